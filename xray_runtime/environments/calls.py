"""A queue of calls from any thread to one thread that runs them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue


class CallQueue:
    """Calls that one thread runs in order; it waits until `waiting` is readable."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self.waiting, self._is_closed = os.eventfd(0), False
        """`waiting`: file descriptor."""

    def put(self, call: Callable[[], None]) -> bool:
        """Add a call; returns False if the queue is closed, so that it will not run."""
        with self._lock:
            if not self._is_closed:
                self._calls.put(call)
                os.eventfd_write(self.waiting, 1)
            return not self._is_closed

    def run(self) -> None:
        """Run the calls in the queue."""
        os.eventfd_read(self.waiting)
        self._drain()

    def close(self) -> None:
        """Refuse further calls, and run those in the queue."""
        with self._lock:
            self._is_closed = True
            os.close(self.waiting)
        self._drain()

    def _drain(self) -> None:
        while not self._calls.empty():
            self._calls.get()()
