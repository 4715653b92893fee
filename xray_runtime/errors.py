"""Errors as people need them: the first true cause, and whether a retry could help."""

from __future__ import annotations


def root_cause(error: BaseException) -> BaseException:
    """The exception behind Ray's and Prefect's wrappers: what happened first, in the process where it happened."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        # Ray wraps a remote exception in RayTaskError and keeps the original in `cause`.
        inner = getattr(error, "cause", None)
        if isinstance(inner, BaseException):
            error = inner
            continue
        # Our own errors are already the explanation; what they were raised from is detail.
        if error.__cause__ is not None and not isinstance(error, ValueError | RuntimeError):
            error = error.__cause__
    return error


class StageInterruptedError(RuntimeError):
    """The stage was asked to stop, and did, with a snapshot."""


def may_retry(error: BaseException) -> bool:
    """Whether trying again could help: not where the input is to blame, nor where somebody asked to stop."""
    return not isinstance(root_cause(error), ValueError | StageInterruptedError)
