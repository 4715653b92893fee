"""The studio: pages over an output directory, for people who do not use a shell. They call what the commands call."""
