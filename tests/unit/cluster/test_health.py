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
FIRST = 100
"""The first rank's reference."""


class OneByOne:
    """Ray whose calls answer one after the other, each `seconds` after the one before. A reference is its own answer."""

    def __init__(self, seconds: float) -> None:
        self.now, self._seconds = 0.0, seconds
        self.looked_at = 0
        """References that `wait` was given, in all."""

    def wait(self, refs: Sequence[Any], *, num_returns: int = 1, timeout: float) -> tuple[list[Any], list[Any]]:
        self.looked_at += len(refs)
        self.now = max(self.now, min(sorted(map(self._done, refs))[num_returns - 1], self.now + timeout))
        done = [ref for ref in refs if self._done(ref) <= self.now + 1e-9][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def _done(self, ref: int | Heartbeat) -> float:
        return 0.0 if isinstance(ref, Heartbeat) else (ref - FIRST + 1) * self._seconds

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
    answers: list[Any] = list(range(FIRST, FIRST + NUM_RANKS))
    assert monitor.collect(answers) == answers
    assert len(asked) <= most
    assert bool(asked) == bool(most)


def test_what_is_looked_at_grows_with_the_ranks_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []
    for num_ranks in (8, 64, 512):
        # All ranks answer within 10 ms, one after the other.
        ray = OneByOne(0.01 / num_ranks)
        monkeypatch.setattr(health, "ray", ray)
        monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda ray=ray: ray.now))
        workhorses: list[Any] = [object() for _ in range(num_ranks)]
        monitor = HealthMonitor("policy", workhorses, Path("logs"), 120.0, 600.0)
        answers: list[Any] = list(range(FIRST, FIRST + num_ranks))
        assert monitor.collect(answers) == answers
        looked_at.append(ray.looked_at)
    assert looked_at == [2 * 8, 2 * 64, 2 * 512]
