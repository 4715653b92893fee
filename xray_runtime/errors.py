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


def error_summary(error: BaseException) -> str:
    """The root cause in one line, and where it happened if a note says so."""
    cause = root_cause(error)
    notes = getattr(cause, "__notes__", [])
    place = f" {notes[0].splitlines()[0]}" if notes else ""
    return f"{(str(cause).strip() or type(cause).__name__).splitlines()[0]}{place}"


OUT_OF_MEMORY_WORDS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "low memory",
    "std::bad_alloc",
    "status_alloc_failed",  # cuBLAS and cuDNN, which need room beside torch's
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the device, in torch's CPU allocator, or by the judgement of Ray's memory monitor."""
    cause = root_cause(error)
    if isinstance(cause, MemoryError) or type(cause).__name__ in ("OutOfMemoryError", "StageOutOfMemoryError"):
        return True
    text = f"{error} {cause}".lower()
    return any(words in text for words in OUT_OF_MEMORY_WORDS)


class StageOutOfMemoryError(RuntimeError):
    """A stage ran out of memory; the message names what to lower."""


class NonFiniteError(RuntimeError):
    """A number that would be trained on or published is NaN or infinite; the message names where."""


class StageInterruptedError(RuntimeError):
    """The stage was asked to stop, and did, with a snapshot."""


class WorkerEndedError(RuntimeError):
    """The process of a stage was asked to end (its node is drained, say); the stage did, with a snapshot. The run was
    not, so the stage is tried again."""


def is_cancelled(error: BaseException) -> bool:
    """Whether somebody asked for the end: by a signal, or through a stage that heeded the wish to stop."""
    return not isinstance(error, Exception) or isinstance(root_cause(error), StageInterruptedError)


def may_retry(error: BaseException) -> bool:
    """Whether trying again could help: not where the input is to blame, nor where somebody asked to stop, nor where the
    same computation would meet the same NaN."""
    return not isinstance(root_cause(error), ValueError | StageInterruptedError | NonFiniteError)
