"""An OpenAI-compatible server: which model it serves, whether that is allowed, and how another one replaces it."""


class NotServedError(RuntimeError):
    """A model may not be served, or cannot be; the message says why."""
