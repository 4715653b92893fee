"""Code of a reply and the tests that judge it, each in a process of its own. The standard library alone."""
