"""Pictures and the one-file report of a lifecycle, drawn from its records."""
