"""Progress from stages to whoever watches, and the wish to stop back to them: a small named Ray actor."""

from __future__ import annotations

import time
from typing import Any

import ray

from xray_runtime.workers.nodes import same_node

NAME, NAMESPACE = "xray-progress", "xray"

Progress = tuple[int, int, str, str]
"""(done, total, unit, note)."""


class ProgressActor:
    """Latest progress by stage."""

    def __init__(self) -> None:
        self._latest: dict[str, Progress] = {}
        self._stopping = False

    def report(self, stage: str, done: int, total: int, unit: str, note: str) -> bool:
        """Take note; returns whether the stage should stop, with a snapshot, as soon as it can."""
        self._latest[stage] = (done, total, unit, note)
        return self._stopping

    def read(self) -> dict[str, Progress]:
        return dict(self._latest)

    def begin(self) -> None:
        """A lifecycle begins: what was reported to the one before, and its wish to stop, are over."""
        self._latest.clear()
        self._stopping = False

    def stop(self) -> None:
        """Ask every stage that reports from now on to stop."""
        self._stopping = True


def open_progress() -> Any:
    """The board of this cluster, made where there is none."""
    options = {"name": NAME, "namespace": NAMESPACE, "get_if_exists": True, "num_cpus": 0}
    while True:
        board = ray.remote(ProgressActor).options(**options, scheduling_strategy=same_node()).remote()
        try:
            ray.get(board.read.remote())
        except ray.exceptions.ActorDiedError:
            # The last one's holder has just let go of it: its name is free in a moment.
            time.sleep(0.1)
        else:
            return board


def find_progress() -> Any | None:
    """The board, or None where nobody opened one."""
    try:
        return ray.get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        return None
