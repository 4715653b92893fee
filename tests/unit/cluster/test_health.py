"""Heartbeats are asked for by time, not for every answer of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xray_runtime.cluster import health
from xray_runtime.cluster.health import HealthMonitor
from xray_runtime.cluster.types import Heartbeat

NUM_RANKS = 64


class OneByOne:
    """Ray whose calls answer one after the other, each after `seconds`. A reference is its own answer."""

    def __init__(self, seconds: float) -> None:
        self.now, self._seconds = 0.0, seconds

    def wait(self, refs: Sequence[Any], *, num_returns: int = 1, timeout: float) -> tuple[list[Any], list[Any]]:
        if timeout:
            self.now += min(self._seconds, timeout)
        return list(refs[:1]), list(refs[1:])

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        return ref


@pytest.mark.parametrize(
    ("seconds", "most"),
    [
        (0.0, 0),
        # 64 answers in 6.4 s: three rounds of heartbeats, of all ranks at most.
        (0.1, 3 * NUM_RANKS),
    ],
)
def test_heartbeats_do_not_grow_with_answers(monkeypatch: pytest.MonkeyPatch, seconds: float, most: int) -> None:
    ray, asked = OneByOne(seconds), []

    def request(workhorse: Any) -> Heartbeat:
        asked.append(workhorse)
        return Heartbeat("here", 1, 0.0, "nothing", parts=0, common_parts=0, stands_s=0.0, load=1.0)

    monkeypatch.setattr(health, "ray", ray)
    monkeypatch.setattr(health, "get", ray.get)
    monkeypatch.setattr(health, "request_heartbeat", request)
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: ray.now))
    workhorses: list[Any] = [object() for _ in range(NUM_RANKS)]
    monitor = HealthMonitor("policy", workhorses, Path("logs"), 120.0, 600.0)
    answers: list[Any] = list(range(100, 100 + NUM_RANKS))
    assert monitor.collect(answers) == answers
    assert len(asked) <= most
    assert bool(asked) == bool(most)
