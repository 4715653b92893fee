"""Libraries that others import where they are installed, and that this process need not import."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


def hide(*libraries: str) -> list[str]:
    """Let imports of these libraries fail as if they were not installed; returns those that this process has not yet
    imported, the only ones that are hidden."""
    names = [name for name in libraries if name not in sys.modules]
    sys.modules |= dict.fromkeys(names)  # type: ignore[arg-type]
    return names


def show(*libraries: str) -> None:
    """Undo `hide`."""
    for name in libraries:
        if name in sys.modules and sys.modules[name] is None:
            del sys.modules[name]


@contextlib.contextmanager
def hidden(*libraries: str) -> Iterator[None]:
    """`hide` them while the context lasts."""
    names = hide(*libraries)
    try:
        yield
    finally:
        show(*names)
