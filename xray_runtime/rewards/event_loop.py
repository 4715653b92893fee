"""The event loop of all async functions of this process, so that their clients and semaphores work in every call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any

GRACE_S = 5.0
"""A loop that does not react for so long is blocked by a function, and is replaced."""

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def start(awaitable: Awaitable[Any]) -> Future[Any]:
    """Run `awaitable` in the loop."""

    async def awaited() -> Any:
        return await awaitable

    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="reward functions", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(awaited(), _loop)


def cancel(future: Future[Any]) -> None:
    """Cancel what `start` began; later calls get another loop if this one does not react."""
    global _loop
    loop, reacts = _loop, threading.Event()
    future.cancel()
    if loop is not None:
        loop.call_soon_threadsafe(reacts.set)
    if not reacts.wait(GRACE_S):
        with _lock:
            _loop = None if _loop is loop else _loop
