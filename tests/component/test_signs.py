"""A call that takes long shows by its heartbeats that it is at work, and one that hangs does not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import ray

from xray_runtime.cluster import health
from xray_runtime.cluster.health import HealthMonitor
from xray_runtime.cluster.heartbeat import CONCURRENCY_GROUP, HeartbeatSource
from xray_runtime.cluster.types import Heartbeat
from xray_runtime.kernel.signs import part_done

HEARTBEAT_SECONDS = 0.3


class Worker:
    def __init__(self) -> None:
        self._source = HeartbeatSource()

    @ray.method(concurrency_group=CONCURRENCY_GROUP)
    def heartbeat(self) -> Heartbeat:
        return self._source.heartbeat()

    def work(self, parts: int) -> None:
        for _ in range(parts):
            time.sleep(0.05)
            part_done()

    def hang(self) -> None:
        time.sleep(4 * HEARTBEAT_SECONDS)


def test_work_shows_and_waiting_does_not(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "HEARTBEAT_SECONDS", HEARTBEAT_SECONDS)
    kind: Any = ray.remote(concurrency_groups={CONCURRENCY_GROUP: 1})(Worker)
    workers = [kind.options(num_cpus=0).remote() for _ in range(2)]
    seen: list[int] = []
    monitor = HealthMonitor("policy", workers, tmp_path, 120.0, 600.0, seen.append)
    monitor.begin()
    monitor.collect([worker.hang.remote() for worker in workers])
    assert seen == []
    parts = int(8 * HEARTBEAT_SECONDS / 0.05)
    monitor.collect([worker.work.remote(parts) for worker in workers])
    assert len(seen) >= 2
    assert 0 < sum(seen) <= 2 * parts
    for worker in workers:
        ray.kill(worker)
