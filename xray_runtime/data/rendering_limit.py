"""A time limit for chat templates: programs of strangers, which may loop without end.

Python cannot end a thread, but can have it raise an exception before its next step in Python.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT_S = 20.0
"""A conversation takes milliseconds; busy machines take longer."""
MAX_CHARS = 2**26


class RenderingTooLongError(Exception):
    """A rendering takes longer than `LIMIT_S`."""


class _Watch:
    """One thread, which ends renderings of others that take too long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[int, float] = {}
        """Thread → when its rendering began."""
        self._ended = set[int]()
        self._thread: threading.Thread | None = None

    @contextmanager
    def limited(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._lock:
            self._begun[me] = time.monotonic()
            # A forked process has no threads but its own.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="chat template limit", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                del self._begun[me]
                if me in self._ended:
                    self._ended.discard(me)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(me), None)

    def _run(self) -> None:
        while True:
            time.sleep(min(1.0, LIMIT_S / 4))
            with self._lock:
                if not self._begun:
                    self._thread = None
                    return
                for thread, begun in self._begun.items():
                    if time.monotonic() - begun > LIMIT_S:
                        self._ended.add(thread)
                        raised = ctypes.py_object(RenderingTooLongError)
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


_WATCH = _Watch()


@contextmanager
def limited_rendering() -> Iterator[None]:
    """Raises ValueError in the body if it takes longer than `LIMIT_S`."""
    try:
        with _WATCH.limited():
            yield
    except RenderingTooLongError:
        raise ValueError(f"it is not done after {LIMIT_S:g} s") from None


def check_size(text: str) -> str:
    """`text`. Raises ValueError if no conversation could be so long."""
    if len(text) > MAX_CHARS:
        raise ValueError(f"it writes {len(text):,} characters")
    return text
