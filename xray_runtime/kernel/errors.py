"""Root causes of errors, whether a retry could help, and values in their texts."""

from __future__ import annotations

from typing import Any


def root_cause(error: BaseException) -> BaseException:
    """The first exception, without Ray's and Prefect's wrappers."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        # Ray wraps a remote exception in RayTaskError and keeps the original in `cause`.
        inner = getattr(error, "cause", None)
        if isinstance(inner, BaseException):
            error = inner
            continue
        # X-ray's own errors already explain the problem; their causes are details.
        if error.__cause__ is not None and not isinstance(error, ValueError | RuntimeError):
            error = error.__cause__
    return error


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def cause_line(error: BaseException) -> str:
    """The fault in one line; for an error of pydantic, whose first line only counts, each field and finding."""
    find = getattr(error, "errors", None)
    if not isinstance(error, ValueError) or not callable(find):
        return first_line(error)
    details = [(".".join(map(str, each.get("loc", ()))), str(each.get("msg", ""))) for each in find()]
    lines = [f"{field}: {text}" if field else text for field, text in details]
    return " ".join("; ".join(lines).removeprefix("Value error, ").split()) or first_line(error)


def error_summary(error: BaseException) -> str:
    """The root cause in one line, with the place if a note contains it."""
    cause = root_cause(error)
    notes = getattr(cause, "__notes__", [])
    line = f" {notes[0].splitlines()[0]}" if notes else ""
    return f"{first_line(cause)}{line}"


def shown(value: Any) -> str:
    """A value in one short line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:100]}..."


OUT_OF_MEMORY_WORDS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "low memory",
    "std::bad_alloc",
    "status_alloc_failed",  # cuBLAS and cuDNN allocate outside torch
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: on the device, in torch's CPU allocator, or according to Ray's memory monitor."""
    cause = root_cause(error)
    if isinstance(cause, MemoryError) or type(cause).__name__ in ("OutOfMemoryError", "StageOutOfMemoryError"):
        return True
    text = f"{error} {cause}".lower()
    return any(words in text for words in OUT_OF_MEMORY_WORDS)


class StageOutOfMemoryError(RuntimeError):
    """A stage ran out of memory; the message names the fields to lower."""


class NonFiniteError(RuntimeError):
    """A number that would be trained on or published is NaN or infinite; the message names the place."""


class StageInterruptedError(RuntimeError):
    """The stage stopped on request, after a snapshot."""


class WorkerEndedError(RuntimeError):
    """The process of a stage ended on request (its node is drained, say), after a snapshot. The run continues, so the
    stage is retried."""


def is_cancelled(error: BaseException) -> bool:
    """Whether the run was cancelled: by a signal, or because a stage was asked to stop."""
    return not isinstance(error, Exception) or isinstance(root_cause(error), StageInterruptedError)


def may_retry(error: BaseException) -> bool:
    """Whether a retry could help: not after an invalid input, a request to stop, or a NaN, which would recur."""
    return not isinstance(root_cause(error), ValueError | StageInterruptedError | NonFiniteError)
