"""Models come and go, and nothing stays: no process, shared memory, open file, object or placement group.

XRAY_LEAK_CYCLES=50 runs the long form.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from tests.component.models import text
from tests.component.processes import open_models
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.data.batch import StepTotals
from xray_runtime.engines.trainers.deepspeed.config import DeepSpeedConfig
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.processes import TAG, tagged
from xray_runtime.methods.sft.config import SFTConfig
from xray_runtime.models.objectives import SFTObjective

pytestmark = pytest.mark.long

CYCLES = int(os.environ.get("XRAY_LEAK_CYCLES", "2"))
SETTLE_SECONDS = 60.0
RUNTIME = RuntimeConfig(threads=1, device="cpu")
SERVERS = ("raylet", "gcs_server")


def cycle(model: Path, logs: Path) -> None:
    """A model of two ranks that trains, exports and ends, beside one that goes back to the worker pool."""
    trained = ModelSpec(model, SFTObjective(), SFTConfig(engine=DeepSpeedConfig(num_workhorses=2, zero_stage=1)))
    with open_models(RUNTIME, logs, {"policy": trained, "reference": ModelSpec(model, SFTObjective())}) as models:
        ray.get(models["policy"].train.remote(text(), StepTotals(tokens=10.0), 1e-3))
        update = ray.get(models["policy"].export_weights.remote(1))
        assert update.version == 1
        ray.get(models["reference"].score.remote(text()))


def left() -> dict[str, int]:
    """What there is of everything that could be left behind."""
    mine = tagged(os.environ[TAG])
    workers = [p for p in mine if _command(p).startswith("ray::")]
    pids = {p.pid for p in mine} | {os.getpid()}
    free = ray.available_resources()
    return {
        "actors": sum(not _command(p).startswith("ray::IDLE") for p in workers),
        "files of Ray's servers": sum(p.num_fds() for p in mine if p.name() in SERVERS),
        "files of this process": psutil.Process().num_fds(),
        "shared memory": sum(1 for path in Path("/dev/shm").iterdir() if _is_of(path, pids)),
        "object store bytes": int(ray.cluster_resources()["object_store_memory"] - free["object_store_memory"]),
        "reserved thousandths of a CPU": round(1000 * (ray.cluster_resources()["CPU"] - free.get("CPU", 0.0))),
        "placement groups": sum(g["state"] != "REMOVED" for g in ray.util.placement_group_table().values()),
    }


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "ray::IDLE"  # it has just ended


def _is_of(path: Path, pids: set[int]) -> bool:
    """Whether a shared-memory file names one of our processes, or one that has ended since, or our meeting place."""
    return path.name.startswith("deepspeed_allreduce") or any(f"{pid}" in path.name for pid in pids)


def test_nothing_is_left_of_models_that_came_and_went(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    cycle(tiny_model, tmp_path)  # what is kept once for all (the pool's process, Ray's idle workers) is there now
    before = _settled({})
    for _ in range(CYCLES):
        cycle(tiny_model, tmp_path)
    assert _grown(_settled(before), before) == {}


def _settled(before: dict[str, int]) -> dict[str, Any]:
    """What is left once it no longer falls, or is no more than `before`."""
    deadline, found = time.monotonic() + SETTLE_SECONDS, left()
    while time.monotonic() < deadline and (not before or _grown(found, before)):
        time.sleep(2.0)
        now = left()
        if not before and now == found:
            break
        found = now
    return found


def _grown(now: dict[str, int], before: dict[str, int]) -> dict[str, tuple[int, int]]:
    return {name: (before[name], count) for name, count in now.items() if count > before[name] + _ALLOWED.get(name, 0)}


_ALLOWED = {"files of Ray's servers": 2 * CYCLES if CYCLES < 5 else 10, "files of this process": 4}
"""Connections to workers that Ray keeps ready; far less than one a model."""
