"""Models behind an OpenAI-compatible server: which one, whether it may be served, and how another takes its place."""


class NotServedError(RuntimeError):
    """A model may not be served, or cannot be; the message says why."""
