"""The worker pool on real Ray: which processes wait for the next model, and which are ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from tests.component.processes import RUN_ID, SECONDS, Empty, EmptySpec, Holder, Other, gone, open_models, pid_of, pids
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.opening import prestart_models
from xray_runtime.cluster.pool.pool import PING_SECONDS, evict_idle_workers, find_worker_pool, open_worker_pool
from xray_runtime.cluster.progress import find_progress, open_progress
from xray_runtime.data.batch import StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.layouts import EngineConfig, FrozenConfig, GeneratorConfig
from xray_runtime.engines.roles import ModelRole, frozen, sampled
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.methods.sft.config import SFTConfig
from xray_runtime.models.objectives import SFTObjective

numbers = itertools.count(1000)


def a_runtime(**fields: Any) -> RuntimeConfig:
    """A runtime that nothing else in these tests has: what other tests left in the pool is no use to it."""
    return RuntimeConfig(device="cpu", threads=1, retry_delay_s=float(next(numbers)), **fields)


@pytest.fixture
def pool(cluster: None) -> Any:
    """The pool of all tests, without the processes that others left idle."""
    found = find_worker_pool(RUN_ID)
    ray.get(found.evict_idle.remote(), timeout=SECONDS)
    return found


@pytest.fixture
def holders(cluster: None) -> Iterator[Any]:
    """Starts actors that hold leases; what they have at the end is ended."""
    started: list[Any] = []

    def start() -> Any:
        started.append(Holder.remote())
        return started[-1]

    yield start
    ray.get(find_worker_pool(RUN_ID).kill_leased.remote(started))


def lease(pool: Any, holder: Any, runtime: RuntimeConfig, kind: type = Empty) -> int:
    """Process id of one Workhorse that is leased to `holder`."""
    [workhorse] = ray.get(pool.acquire.remote(kind, runtime, 1, holder, "trainer:deepspeed"), timeout=SECONDS)
    return pid_of(workhorse)


def num_idle(pool: Any) -> int:
    found: int = ray.get(pool.__ray_call__.remote(lambda p: len(p._idle)))
    return found


def text() -> TextBatch:
    return TextBatch(input_ids=Ragged.of([[5, 9, 7, 42, 1], [8, 100, 3]]), prompt_lengths=np.array([2, 1]))


def test_a_process_that_did_its_work_waits_for_the_next_model(pool: Any, holders: Any) -> None:
    runtime = a_runtime()
    first, second, third = holders(), holders(), holders()
    before = lease(pool, first, runtime)
    ray.get(pool.release.remote(first))
    assert psutil.pid_exists(before)
    assert lease(pool, second, runtime) == before
    # One that is leased is not leased twice.
    assert lease(pool, third, runtime) != before
    # Nor does one serve where another kind, or other numerics, are wanted.
    ray.get(pool.release.remote(second))
    assert lease(pool, third, runtime, Other) != before
    assert lease(pool, third, runtime.model_copy(update={"threads": 2})) != before
    assert lease(pool, third, runtime) == before


def test_the_next_stage_finds_its_processes_ready(pool: Any, holders: Any) -> None:
    runtime, stage, next_stage = a_runtime(), holders(), holders()
    leased = lease(pool, stage, runtime, Learner)
    before = num_idle(pool)
    # One of the two is there already, leased to the stage at work. Models of several ranks get no process here.
    roles = {
        "policy": ModelRole(use="trained", layout=EngineConfig(), field="engine", shape="base"),
        "reference": frozen(FrozenConfig(), "base"),
        "large": frozen(FrozenConfig(num_workhorses=2), "base"),
    }
    for _ in range(2):
        prestart_models(roles, runtime, RUN_ID)
        ray.get(pool.ping.remote(), timeout=SECONDS)
    assert num_idle(pool) == before + 1
    [workhorse] = ray.get(pool.acquire.remote(Learner, runtime, 1, next_stage, "trainer:deepspeed"), timeout=SECONDS)
    assert pid_of(workhorse) != leased
    assert num_idle(pool) == before
    loaded = ray.get(workhorse.__ray_call__.remote(lambda _: set(sys.modules)), timeout=SECONDS)
    assert {"torch", "deepspeed", "transformers"} <= loaded
    # Nothing is started that has to wait for CPUs, nor where there is no pool.
    greedy = runtime.model_copy(update={"cpus_per_workhorse": 1000.0})
    generator = {"generator": sampled(GeneratorConfig(), "base")}
    prestart_models(generator, greedy, RUN_ID)
    prestart_models(generator, runtime, "nobody's")
    ray.get(pool.ping.remote())
    assert num_idle(pool) == before


def test_workers_of_a_killed_holder_end(pool: Any, holders: Any) -> None:
    runtime, lost, busy = a_runtime(), holders(), holders()
    left, kept = lease(pool, lost, runtime), lease(pool, busy, runtime)
    ray.kill(lost)
    time.sleep(0.5)
    assert psutil.pid_exists(left)
    # The next call finds it; a holder that is only busy keeps what it has.
    busy.work.remote(3.0)
    assert lease(pool, holders(), runtime) not in (left, kept)
    assert gone(left)
    assert psutil.pid_exists(kept)


def test_a_released_worker_outlives_its_holder(pool: Any, holders: Any) -> None:
    runtime, first = a_runtime(), holders()
    before = lease(pool, first, runtime)
    ray.get(pool.release.remote(first))
    ray.kill(first)
    lease(pool, holders(), runtime, Other)
    assert lease(pool, holders(), runtime) == before


def test_one_that_died_while_it_was_idle_is_not_leased(pool: Any, holders: Any) -> None:
    runtime, first = a_runtime(), holders()
    before = lease(pool, first, runtime)
    ray.get(pool.release.remote(first))
    os.kill(before, signal.SIGKILL)
    assert gone(before)
    assert psutil.pid_exists(lease(pool, holders(), runtime))


def test_busy_holders_do_not_keep_the_next_one_waiting(pool: Any, holders: Any) -> None:
    """All models of a stage start at once: the last must not wait for each of the others in turn."""

    # Not of this module, which the pool would import, and torch with it.
    def seconds_to_find_abandoned(pool: Any) -> float:
        start = time.monotonic()
        assert pool._kill_abandoned() == 0
        return time.monotonic() - start

    runtime, busy = a_runtime(), [holders() for _ in range(4)]
    for holder in busy:
        lease(pool, holder, runtime)
        holder.work.remote(6.0)
    # Without the start of a process, which on a busy machine takes as long.
    assert ray.get(pool.__ray_call__.remote(seconds_to_find_abandoned), timeout=SECONDS) < len(busy) * PING_SECONDS


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
def test_without_its_pool_a_model_gets_processes_of_its_own(
    cluster: None, tiny_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run_id = f"pool ended by {number.name}"
    pool = open_worker_pool(run_id)
    os.kill(pid_of(pool), number)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(pool.ping.remote())
    assert find_worker_pool(run_id) is None
    with open_models(a_runtime(), tmp_path, {"one": EmptySpec(tiny_model)}, run_id) as models:
        [process] = pids(models["one"])
    assert gone(process)
    again = open_worker_pool(run_id)
    assert again != pool
    assert find_worker_pool(run_id) == again


def test_runs_do_not_touch_each_other(pool: Any, holders: Any) -> None:
    runtime, holder = a_runtime(), holders()
    before = lease(pool, holder, runtime)
    ray.get(pool.release.remote(holder))
    other = open_worker_pool("another")
    assert find_worker_pool("another") == other != pool
    theirs = lease(other, holders(), runtime)
    assert theirs != before
    # The end of a run is the end of its processes alone.
    ray.kill(other)
    assert gone(theirs)
    assert lease(pool, holders(), runtime) == before

    mine, yours = open_progress("mine"), open_progress("yours")
    ray.get([mine.report.remote("sft", 1, 2, "steps", ""), yours.stop.remote()])
    assert ray.get(mine.report.remote("sft", 2, 2, "steps", "")) is False
    assert ray.get(yours.report.remote("sft", 0, 9, "steps", "")) is True
    assert ray.get(mine.read.remote()) == {"sft": (2, 2, "steps", "", 0)}
    assert find_progress("nobody's") is None


@pytest.mark.parametrize("run_id", [RUN_ID, "another"], ids=["of this run", "of another run"])
def test_idle_processes_do_not_starve_a_stage(
    cluster: None, holders: Any, tiny_model: Path, tmp_path: Path, run_id: str
) -> None:
    """Of two CPUs one is held by an idle process; two models want one each, at the same time."""
    evict_idle_workers()
    pool, holder = open_worker_pool(run_id), holders()
    idle = lease(pool, holder, a_runtime(cpus_per_workhorse=1.0))
    ray.get(pool.release.remote(holder))
    empty = EmptySpec(tiny_model)
    with open_models(a_runtime(cpus_per_workhorse=0.9), tmp_path, {"one": empty, "other": empty}) as models:
        assert pids(models["one"]) != pids(models["other"])
    assert gone(idle)


def test_several_ranks_get_their_devices_and_are_never_kept(
    pool: Any, holders: Any, tiny_model: Path, tmp_path: Path
) -> None:
    evict_idle_workers()
    holder = holders()
    idle = lease(pool, holder, a_runtime(cpus_per_workhorse=1.0))
    ray.get(pool.release.remote(holder))
    spec = EmptySpec(tiny_model, training=SFTConfig(engine=EngineConfig(num_workhorses=2)))
    with open_models(a_runtime(cpus_per_workhorse=0.9), tmp_path, {"policy": spec}) as models:
        ranks = pids(models["policy"])
        assert len(set(ranks)) == 2
        [group] = [g for g in ray.util.placement_group_table().values() if g["state"] == "CREATED"]
        assert RUN_ID in group["name"]
    assert all(map(gone, [idle, *ranks]))


def test_nothing_of_the_model_before_is_left(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    """A policy is trained, then a frozen model is built in the same process: it scores as in a process of its own."""
    runtime = a_runtime()
    frozen = {"policy": ModelSpec(tiny_model, SFTObjective())}
    with open_models(runtime, tmp_path, frozen) as models:
        fresh = ray.get(models["policy"].score.remote(text())).nll
        first = pids(models["policy"])
    trained = {"policy": ModelSpec(tiny_model, SFTObjective(), training=SFTConfig(lr=0.1))}
    with open_models(runtime, tmp_path, trained) as models:
        assert pids(models["policy"]) == first
        ray.get(models["policy"].train.remote(text(), StepTotals(tokens=5.0), 0.1))
        assert (ray.get(models["policy"].score.remote(text())).nll != fresh).all()
    with open_models(runtime, tmp_path, frozen) as models:
        assert pids(models["policy"]) == first
        np.testing.assert_array_equal(ray.get(models["policy"].score.remote(text())).nll, fresh)


def test_the_processes_of_a_failed_stage_are_ended(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    seen: list[int] = []

    def stage() -> None:
        with open_models(a_runtime(), tmp_path, {"policy": EmptySpec(tiny_model)}) as models:
            seen.extend(pids(models["policy"]))
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        stage()
    assert gone(seen[0])
