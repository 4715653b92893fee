"""Wait for a starting server as long as it lives and makes progress, however slow the machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

LOST = 75
"""Exit code of a run whose Ray died (EX_TEMPFAIL)."""
IDLE_SECONDS = 240.0
"""A start has failed after this long with hardly any CPU time used and nothing logged."""
WORKING = 0.01
"""Share of a core that a working process gets even among a hundred others. An idle server uses less."""
CHECK_SECONDS = 1.0
"""Checking more often would itself take CPU time."""


class NotUpError(Exception):
    """A server did not start; the message gives the reason and the log.

    Not a RuntimeError: Ray keeps waiting after one of those.
    """


class Patience:
    """Monitors the start of a server.

    Args:
        title: its name for people.
        processes: finds its processes.
        log: its log, or the directory of several.
    """

    def __init__(self, title: str, processes: Callable[[], Iterable[psutil.Process]], log: Path) -> None:
        self._title, self._processes, self._log = title, processes, log
        self._checked = self._moved = time.monotonic()
        self._used, self._logged = 0.0, 0

    def check(self) -> None:
        """Raises NotUpError if nothing has happened for IDLE_SECONDS."""
        now = time.monotonic()
        if now - self._checked < CHECK_SECONDS:
            return
        self._checked = now
        used, logged = sum(map(_cpu_seconds, self._processes())), sum(map(_size, self._logs()))
        if logged != self._logged or abs(used - self._used) > WORKING * (now - self._moved):
            self._moved, self._used, self._logged = now, used, logged
        elif now - self._moved > IDLE_SECONDS:
            raise NotUpError(f"{self._title} has done nothing for {IDLE_SECONDS:.0f} s. {end_of(self.newest_log())}")

    def newest_log(self) -> Path:
        return max(filter(_size, self._logs()), key=lambda path: path.stat().st_mtime, default=self._log)

    def _logs(self) -> list[Path]:
        if not self._log.is_dir():
            return [self._log] if self._log.exists() else []
        return [Path(folder) / name for folder, _, names in os.walk(self._log) for name in names]


def end_of(log: Path, *marks: str) -> str:
    """A log's path and its last line, preferably one with the first of `marks` that occurs."""
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    matches = (line.strip() for mark in (*marks, "") for line in reversed(lines) if mark in line and line.strip())
    last = next(matches, "")
    return f"The end of {log}: {last}" if last else f"Its log is {log}, and empty"


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _cpu_seconds(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0
