"""Calls that any thread hands to the one that runs them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue


class CallQueue:
    """Calls, run in order by one thread, which waits for `waiting` to be readable."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self.waiting, self._is_closed = os.eventfd(0), False
        """`waiting`: a file descriptor."""

    def put(self, call: Callable[[], None]) -> bool:
        """Hand over a call; False: too late, it will not run."""
        with self._lock:
            if not self._is_closed:
                self._calls.put(call)
                os.eventfd_write(self.waiting, 1)
            return not self._is_closed

    def run(self) -> None:
        """Run what was handed over."""
        os.eventfd_read(self.waiting)
        self._drain()

    def close(self) -> None:
        """Take no more; what was handed over before is run."""
        with self._lock:
            self._is_closed = True
            os.close(self.waiting)
        self._drain()

    def _drain(self) -> None:
        while not self._calls.empty():
            self._calls.get()()
