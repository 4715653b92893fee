"""Waiting for what other processes do, and ending them."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T],
    *,
    seconds: float,
    process: subprocess.Popen[bytes] | subprocess.Popen[str] | None = None,
    why: object = "it did not happen",
    pause_s: float = 0.1,
) -> T:
    """What `condition` returns, once that is true.

    Raises:
        AssertionError: it is not within `seconds`, or `process` ended before; the message is `why`.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert process is None or process.poll() is None, f"it ended with {process.returncode}: {why}"
        assert time.monotonic() < deadline, why
        time.sleep(pause_s)
    return found


def kill_all(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """SIGKILL to a process and all below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()
