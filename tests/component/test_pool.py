"""The stable on real Ray: which processes wait for the next model, and which are ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from xray_runtime.config.engines import EngineConfig
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.config.sft import SFTConfig
from xray_runtime.models.objectives import SFTObjective
from xray_runtime.planning.demand import Demand
from xray_runtime.workers.generator import Generator
from xray_runtime.workers.learner import Learner
from xray_runtime.workers.model_spec import ModelSpec
from xray_runtime.workers.pool import PING_SECONDS, find_worker_pool, open_worker_pool
from xray_runtime.workers.rows import Rows, pad
from xray_runtime.workers.whole_model import WholeModel, open_models
from xray_runtime.workers.workhorse import Workhorse

SECONDS = 120
ONE = Demand("policy", 1, 0.2, 0.0)
numbers = itertools.count(2)
stables: list[Any] = []
"""Those opened here: a stable lives as long as somebody holds it."""


def a_runtime(**fields: Any) -> RuntimeConfig:
    """A runtime that nothing else in these tests has: what other tests left in the stable is no use to it."""
    return RuntimeConfig(device="cpu", threads=1, retry_delay_s=float(next(numbers)), **fields)


@pytest.fixture
def open_model(cluster: None, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start a WholeModel with one Workhorse and nothing built on it; those still open are ended badly at the end."""
    opened: list[Any] = []

    def start(runtime: RuntimeConfig, kind: type[Workhorse] = Learner) -> Any:
        model = ray.remote(WholeModel).options(num_cpus=0).remote(kind, ONE, runtime, tmp_path)
        opened.append(model)
        return model

    yield start
    for model in opened:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(model.stop.remote(sound=False), timeout=SECONDS)
            ray.kill(model)


def close(model: Any, *, sound: bool) -> None:
    ray.get(model.stop.remote(sound=sound), timeout=SECONDS)
    ray.kill(model)


def pids(model: Any) -> list[int]:
    """Process ids of a model's Workhorses, once they are up."""

    def ask(self: WholeModel) -> list[int]:
        return ray.get([w.__ray_call__.remote(lambda _: os.getpid()) for w in self._workhorses])

    return ray.get(model.__ray_call__.remote(ask), timeout=SECONDS)


def gone(pid: int) -> bool:
    deadline = time.monotonic() + SECONDS
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not psutil.pid_exists(pid)


def text() -> Rows:
    ids, lengths = pad([[5, 9, 7, 42, 1], [8, 100, 3]], 0)
    return {"input_ids": ids, "prompt_lengths": np.array([2, 1]), "lengths": lengths}


def test_a_process_that_did_its_work_waits_for_the_next_model(open_model: Callable[..., Any]) -> None:
    runtime = a_runtime()
    first = open_model(runtime)
    before = pids(first)
    close(first, sound=True)
    assert psutil.pid_exists(before[0])
    second = open_model(runtime)
    assert pids(second) == before
    # One that is lent is not lent twice.
    third = open_model(runtime)
    assert pids(third) != before
    # Nor does one serve where another kind, or other numerics, are wanted.
    close(second, sound=True)
    assert pids(open_model(runtime, Generator)) != before
    assert pids(open_model(runtime.model_copy(update={"threads": 2}))) != before
    assert pids(open_model(runtime)) == before


def test_the_next_stage_finds_its_processes_ready(open_model: Callable[..., Any]) -> None:
    runtime = a_runtime()
    stable, first = find_worker_pool(), open_model(runtime)
    assert stable is not None
    [lent] = pids(first)
    # One of the two is there already, lent to the stage at work.
    for _ in range(2):
        ray.get(stable.expect.remote(Learner, runtime, 2), timeout=SECONDS)
    ready = ray.get(stable.__ray_call__.remote(lambda s: len(s._idle)))
    second = open_model(runtime)
    assert pids(second) != [lent]
    assert ray.get(stable.__ray_call__.remote(lambda s: len(s._idle))) == ready - 1
    loaded = ray.get(second.__ray_call__.remote(_modules), timeout=SECONDS)
    assert {"torch", "deepspeed", "transformers"} <= loaded
    # Nobody is made to wait for those that are only expected.
    greedy = runtime.model_copy(update={"cpus_per_workhorse": 1000.0})
    ray.get(stable.expect.remote(Learner, greedy, 1), timeout=SECONDS)
    assert ray.get(stable.__ray_call__.remote(lambda s: len(s._idle))) == ready - 1


def _modules(model: WholeModel) -> set[str]:
    return set(ray.get(model._workhorses[0].__ray_call__.remote(lambda _: list(sys.modules))))


def test_a_process_that_saw_a_failure_is_ended(open_model: Callable[..., Any]) -> None:
    runtime = a_runtime()
    first = open_model(runtime)
    [before] = pids(first)
    close(first, sound=False)
    assert gone(before)
    assert pids(open_model(runtime)) != [before]


def test_what_a_killed_borrower_left_is_ended(open_model: Callable[..., Any]) -> None:
    """A stage's worker that is killed says goodbye to nobody."""
    runtime = a_runtime()
    lost, busy = open_model(runtime), open_model(runtime)
    [left], [kept] = pids(lost), pids(busy)
    ray.kill(lost)
    time.sleep(0.5)
    assert psutil.pid_exists(left)
    # The next one that asks finds it; who only is busy keeps what he has.
    sleeping = busy.__ray_call__.remote(lambda _: time.sleep(3))
    assert pids(open_model(runtime)) not in ([left], [kept])
    assert gone(left)
    ray.get(sleeping)
    assert pids(busy) == [kept]


def test_what_was_given_back_outlives_its_borrower(open_model: Callable[..., Any]) -> None:
    runtime = a_runtime()
    first = open_model(runtime)
    before = pids(first)
    close(first, sound=True)
    # Somebody else asks: what the first had borrowed must not be taken for lost.
    open_model(runtime, Generator)
    assert pids(open_model(runtime)) == before


def test_one_that_died_while_it_waited_is_not_lent(open_model: Callable[..., Any]) -> None:
    runtime = a_runtime()
    first = open_model(runtime)
    [before] = pids(first)
    close(first, sound=True)
    psutil.Process(before).kill()
    assert gone(before)
    [after] = pids(open_model(runtime))
    assert psutil.pid_exists(after)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_without_its_stable_a_model_gets_processes_of_its_own(
    open_model: Callable[..., Any], number: signal.Signals
) -> None:
    stable = find_worker_pool()
    assert stable is not None
    os.kill(ray.get(stable.__ray_call__.remote(lambda _: os.getpid())), number)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(stable.ping.remote())
    assert find_worker_pool() is None
    [pid] = pids(open_model(a_runtime()))
    assert psutil.pid_exists(pid)
    stables.append(open_worker_pool())
    assert stables[-1] != stable
    assert find_worker_pool() is not None


def test_who_waits_does_not_starve_who_is_wanted(
    open_model: Callable[..., Any], tiny_model: Path, tmp_path: Path
) -> None:
    """Of two CPUs one is held by a process that waits; two models want one each, at the same time."""
    waiting = open_model(a_runtime(cpus_per_workhorse=1.0))
    [held] = pids(waiting)
    close(waiting, sound=True)
    frozen = ModelSpec(tiny_model, SFTObjective())
    with open_models(a_runtime(cpus_per_workhorse=0.9), tmp_path, {"one": frozen, "other": frozen}) as models:
        assert pids(models["one"]) != pids(models["other"])
    assert gone(held)


def test_several_ranks_get_their_room_and_are_never_kept(
    open_model: Callable[..., Any], tiny_model: Path, tmp_path: Path
) -> None:
    waiting = open_model(a_runtime(cpus_per_workhorse=1.0))
    [held] = pids(waiting)
    close(waiting, sound=True)
    config = SFTConfig(engine=EngineConfig(num_workhorses=2))
    spec = ModelSpec(tiny_model, SFTObjective(), training=config)
    with open_models(a_runtime(cpus_per_workhorse=0.9), tmp_path, {"policy": spec}) as models:
        ranks = pids(models["policy"])
        assert len(set(ranks)) == 2
    assert all(map(gone, [held, *ranks]))


def test_busy_models_do_not_keep_the_next_one_waiting(open_model: Callable[..., Any]) -> None:
    """All models of a stage start at once: whoever comes last must not wait for each of the others in turn."""
    runtime = a_runtime()
    busy = [open_model(runtime) for _ in range(4)]
    for model in busy:
        pids(model)
    working = [model.__ray_call__.remote(lambda _: time.sleep(6)) for model in busy]
    stable = find_worker_pool()
    assert stable is not None
    start = time.monotonic()
    ray.get(stable.lend.remote(Learner, runtime, busy[0]), timeout=SECONDS)
    seconds = time.monotonic() - start
    ray.get(working)
    assert seconds < len(busy) * PING_SECONDS


def test_nothing_of_the_model_before_is_left(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    """A policy is trained, then a frozen model is built in the same process: it scores as in a process of its own."""
    runtime = a_runtime()
    config = SFTConfig(lr=0.1)
    frozen = {"policy": ModelSpec(tiny_model, SFTObjective())}
    with open_models(runtime, tmp_path, frozen) as models:
        fresh = ray.get(models["policy"].score.remote(text()))["nll"]
        first = pids(models["policy"])
    with open_models(runtime, tmp_path, {"policy": ModelSpec(tiny_model, SFTObjective(), training=config)}) as models:
        assert pids(models["policy"]) == first
        ray.get(models["policy"].train.remote(text(), {"tokens": 5.0}, 0.1))
        assert (ray.get(models["policy"].score.remote(text()))["nll"] != fresh).all()
    with open_models(runtime, tmp_path, frozen) as models:
        assert pids(models["policy"]) == first
        np.testing.assert_array_equal(ray.get(models["policy"].score.remote(text()))["nll"], fresh)


def test_a_stage_that_fails_gives_nothing_back(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    seen: list[int] = []

    def stage() -> None:
        with open_models(a_runtime(), tmp_path, {"policy": ModelSpec(tiny_model, SFTObjective())}) as models:
            seen.extend(pids(models["policy"]))
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        stage()
    assert gone(seen[0])
