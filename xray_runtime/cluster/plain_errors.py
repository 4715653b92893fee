"""Errors of actors that can be sent: one that cannot be pickled arrives as a plain error with its type and its cause.

Ray replaces such an error by one of its own, which looks like the death of a process, and which names the pickling
alone.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from xray_runtime.kernel.errors import cause_line

K = TypeVar("K", bound=type)
KINDS = (ValueError, MemoryError)
"""Types that decide whether a stage is repeated (`kernel.errors.may_retry`, `kernel.errors.is_out_of_memory`)."""


def plain(error: Exception) -> Exception:
    """`error`, or where it cannot be pickled and read back a ValueError, MemoryError or RuntimeError in its place."""
    # Classes of libraries fail in ways of their own.
    with contextlib.suppress(Exception):
        # By the same methods as pickling.
        if type(copy.deepcopy(error)) is type(error):
            return error
    kind: Any = next((kind for kind in KINDS if isinstance(error, kind)), RuntimeError)
    copied: Exception = kind(f"{type(error).__name__}: {cause_line(error)}")
    for note in getattr(error, "__notes__", ()):
        copied.add_note(note)
    return copied


def plain_errors(actor: K) -> K:
    """Class decorator: all public methods that `actor` itself defines raise `plain` errors."""
    for name, method in list(vars(actor).items()):
        if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
            setattr(actor, name, _plainly(method))
    return actor


def _plainly(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(*args: Any, **options: Any) -> Any:
        try:
            return method(*args, **options)
        except Exception as error:
            sendable = plain(error)
            if sendable is error:
                raise
            raise sendable from error

    return called
