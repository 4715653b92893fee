"""The progress actor of a run: stages report progress to it, and its answers tell them to stop."""

from __future__ import annotations

from typing import Protocol

from xray_runtime.cluster.pool.named import NamedActor
from xray_runtime.cluster.protocols import RemoteMethod

Progress = tuple[int, int, str, str, int]
"""(done, total, unit, note, parts of work that its models have done since)."""


class ProgressActor:
    """The latest progress of each stage."""

    def __init__(self) -> None:
        self._latest: dict[str, Progress] = {}
        self._stopping = False

    def ping(self) -> None:
        """Answers as long as this actor lives."""

    def report(self, stage: str, done: int, total: int, unit: str, note: str) -> bool:
        """Store progress; returns whether the stage should stop, with a snapshot, as soon as possible."""
        self._latest[stage] = (done, total, unit, note, 0)
        return self._stopping

    def alive(self, stage: str, parts: int) -> None:
        """Add to the parts of work that a stage's models have done since its latest progress."""
        if stage in self._latest:
            done, total, unit, note, before = self._latest[stage]
            self._latest[stage] = (done, total, unit, note, before + parts)

    def read(self) -> dict[str, Progress]:
        """Stage → its latest progress."""
        return dict(self._latest)

    def stop(self) -> None:
        """Tell every stage that reports from now on to stop."""
        self._stopping = True


class ProgressHandle(Protocol):
    ping: RemoteMethod[[], None]
    report: RemoteMethod[[str, int, int, str, str], bool]
    alive: RemoteMethod[[str, int], None]
    read: RemoteMethod[[], dict[str, Progress]]
    stop: RemoteMethod[[], None]


_ACTORS: NamedActor[ProgressHandle] = NamedActor(ProgressActor, "xray-progress-")
open_progress, find_progress = _ACTORS.open, _ACTORS.find
"""The progress actor of a run. It ends with the process that started it."""
