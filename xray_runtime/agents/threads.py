"""Threads that read and tokenize requests, so that the gateway's event loop answers others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from xray_runtime.agents.request import RefusedError

log = logging.getLogger(__name__)

T = TypeVar("T")

_THREADS = ThreadPoolExecutor(4, "requests of agents")
"""Apart from those that sample and journal: these requests may be made to take long."""


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """The result of a function that a thread calls.

    Raises:
        ValueError: the request is refused, even if the function fails unexpectedly.
    """
    try:
        return await asyncio.get_running_loop().run_in_executor(_THREADS, function, *arguments)
    except ValueError:
        raise
    except Exception as error:
        log.exception("a request of an agent cannot be read")
        raise RefusedError(f"the request cannot be read ({type(error).__name__})") from error
