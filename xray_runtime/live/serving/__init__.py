"""An OpenAI-compatible server: choice and check of the served model, and its replacement."""


class NotServedError(RuntimeError):
    """A model cannot or may not be served; the message has the reason."""
