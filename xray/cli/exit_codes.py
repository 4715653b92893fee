"""Exit codes of commands."""

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""FAILED also means that an audit or a gate found something."""
