"""Stages that start at the same time on one small Ray: each gets all it needs or nothing, and none waits for ever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.component.processes import RUN_ID, SECONDS, EmptySpec, Holder, gone, open_models, pid_of, pids
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.opening import model_opener
from xray_runtime.cluster.pool.acquisition import BusyClusterError
from xray_runtime.cluster.pool.reservations import Reservation, Reservations, Ticket, open_reservations
from xray_runtime.cluster.progress import open_progress
from xray_runtime.engines.layouts import FrozenConfig
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.errors import StageInterruptedError

LAYOUTS = {"single": (FrozenConfig(), 0.6), "placement groups": (FrozenConfig(num_workhorses=2), 0.3)}
"""How each of a stage's two models is spread, and CPUs a Workhorse: 1.2 of 2 CPUs for both models."""


def runtime(cpus: float, **fields: Any) -> RuntimeConfig:
    return RuntimeConfig(device="cpu", threads=1, cpus_per_workhorse=cpus, **fields)


def two_models(model: Path, layout: FrozenConfig) -> dict[str, ModelSpec]:
    return {role: EmptySpec(model, frozen=layout) for role in ("one", "other")}


@ray.remote(num_cpus=0)
class Controller:
    """A stage in a process of its own."""

    def stage(
        self, settings: RuntimeConfig, log_dir: Path, specs: dict[str, ModelSpec], run_id: str, seconds: float
    ) -> tuple[float, float]:
        """Hold the models for a while; returns when they were opened and when they were about to be closed."""
        with model_opener(settings, log_dir, run_id)(specs):
            begin = time.monotonic()
            time.sleep(seconds)
            return begin, time.monotonic()

    def take_turn(self, stage: str) -> bool:
        """Have the ticket, and do not give it back."""
        self.ticket = Ticket("killed", stage, Holder.remote())
        return eventually(lambda: ray.get(open_reservations().is_next.remote(self.ticket)))


def eventually(condition: Callable[[], bool], timeout_s: float = SECONDS) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.2)
    return False


@pytest.fixture(scope="module")
def controllers(cluster: None) -> Iterator[list[Any]]:
    """Two that outlive their stages, as the processes of stages do."""
    both = [Controller.remote() for _ in range(2)]  # type: ignore[attr-defined]
    yield both
    for each in both:
        ray.kill(each)


@pytest.mark.parametrize(
    ("layout", "cpus", "run_ids"),
    [(*LAYOUTS["single"], (RUN_ID, RUN_ID)), (*LAYOUTS["placement groups"], (RUN_ID, "another"))],
    ids=["one run", "two runs, with placement groups"],
)
def test_two_stages_that_each_need_more_than_half_run_one_after_the_other(
    controllers: list[Any],
    tiny_model: Path,
    tmp_path: Path,
    layout: FrozenConfig,
    cpus: float,
    run_ids: tuple[str, str],
) -> None:
    stages = [
        each.stage.remote(runtime(cpus), tmp_path / name, two_models(tiny_model, layout), run_id, 0.5)
        for each, name, run_id in zip(controllers, ("left", "right"), run_ids, strict=True)
    ]
    first, second = sorted(ray.get(stages, timeout=3 * SECONDS))
    assert first[1] <= second[0]


def test_a_stage_of_another_run_is_waited_for_with_a_limit(
    controllers: list[Any], tiny_model: Path, tmp_path: Path
) -> None:
    layout, cpus = LAYOUTS["single"]
    impatient = runtime(cpus, wait_timeout_s=0.5)
    specs = two_models(tiny_model, layout)
    says = (
        rf"^waited 0\.5 s \(runtime\.wait_timeout_s\) for one 0\.6 CPUs; other 0\.6 CPUs, which are in use by "
        rf"free: [0-9.]+ CPUs; {tmp_path}/holding: 1\.2 CPUs$"
    )
    progress = open_progress("patient")
    with open_models(runtime(cpus), tmp_path / "holding", specs, "patient"):
        with (
            pytest.raises(BusyClusterError, match=says),
            open_models(impatient, tmp_path / "waiting", specs, "another"),
        ):
            pass
        # A stage of the same run goes on waiting.
        waiting = controllers[0].stage.remote(impatient, tmp_path / "waiting", specs, "patient", 0.0)
        assert eventually(lambda: "waiting" in ray.get(progress.read.remote()))
        assert not ray.wait([waiting], timeout=1.5)[0]
    ray.get(waiting, timeout=SECONDS)


def test_a_waiting_stage_is_told_to_stop(controllers: list[Any], tiny_model: Path, tmp_path: Path) -> None:
    layout, cpus = LAYOUTS["single"]
    specs = two_models(tiny_model, layout)
    progress = open_progress("stopped")
    with open_models(runtime(cpus), tmp_path / "holding", specs):
        waiting = controllers[0].stage.remote(runtime(cpus), tmp_path / "waiting", specs, "stopped", 0.0)
        assert eventually(lambda: "waiting" in ray.get(progress.read.remote()))
        assert ray.get(progress.read.remote())["waiting"] == (0, 0, "", "waiting for 1.2 CPUs", 0)
        ray.get(progress.stop.remote())
        with pytest.raises(StageInterruptedError, match="waiting: stopped while waiting for devices"):
            ray.get(waiting, timeout=SECONDS)


def test_a_holder_that_is_killed_in_its_turn_does_not_block_the_next(cluster: None) -> None:
    victim: Any = Controller.remote()  # type: ignore[attr-defined]
    assert ray.get(victim.take_turn.remote("victim"), timeout=SECONDS)
    reservations, ticket = open_reservations(), Ticket(RUN_ID, "next", Holder.remote())
    assert not ray.get(reservations.is_next.remote(ticket))
    os.kill(pid_of(victim), signal.SIGKILL)
    assert eventually(lambda: ray.get(reservations.is_next.remote(ticket)))
    ray.get(reservations.end.remote(ticket))


@pytest.mark.parametrize(("layout", "cpus"), LAYOUTS.values(), ids=LAYOUTS)
def test_devices_of_a_killed_stage_are_free_for_the_next(
    cluster: None, tiny_model: Path, tmp_path: Path, layout: FrozenConfig, cpus: float
) -> None:
    specs, victim = two_models(tiny_model, layout), Controller.remote()  # type: ignore[attr-defined]
    process = pid_of(victim)
    victim.stage.remote(runtime(cpus), tmp_path / "victim", specs, RUN_ID, 1000.0)
    assert eventually(lambda: any("victim" in line for line in ray.get(open_reservations().holders.remote())))
    os.kill(process, signal.SIGKILL)
    assert gone(process)
    with open_models(runtime(cpus, wait_timeout_s=60.0), tmp_path / "next", specs, "another") as models:
        assert len(pids(models["one"])) == layout.num_workhorses


def test_models_that_live_together_are_opened_together(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    specs = {"one": EmptySpec(tiny_model)}
    open_both = model_opener(runtime(0.2), tmp_path / "compare", RUN_ID)
    says = "compare: a stage must open all models it uses together in one call"
    with open_both(specs), pytest.raises(RuntimeError, match=says), open_both(specs):
        pass
    with open_both({}) as models:
        assert models == {}


def test_reservations_that_die_are_made_anew(cluster: None) -> None:
    before = open_reservations()
    process = pid_of(before)
    os.kill(process, signal.SIGKILL)
    assert gone(process)
    again, ticket = open_reservations(), Ticket(RUN_ID, "next", Holder.remote())
    assert open_reservations() == again != before
    assert ray.get(again.is_next.remote(ticket))
    ray.get(again.end.remote(ticket))


def test_first_come_first_served(cluster: None) -> None:
    reservations = Reservations()
    first, second, third = (Ticket(RUN_ID, name, Holder.remote()) for name in ("first", "second", "third"))
    assert [reservations.is_next(ticket) for ticket in (first, second, third)] == [True, False, False]
    assert [reservations.is_next(ticket) for ticket in (third, second, first)] == [False, False, True]
    reservations.grant(first, Reservation({"CPU": 1.5}, []))
    reservations.leave(first)
    assert reservations.is_next(second)
    reservations.grant(second, Reservation({"CPU": 0.5, "GPU": 1.0}, []))
    assert reservations.reserved() == {"CPU": 2.0, "GPU": 1.0}
    assert reservations.holders() == ["first: 1.5 CPUs", "second: 0.5 CPUs, 1 GPUs"]
    # One whose turn did not come to anything goes to the end.
    reservations.leave(second)
    assert not reservations.is_next(second)
    assert reservations.is_next(third)
    assert reservations.holds(RUN_ID)
    assert not reservations.holds("another")
    for ticket in (first, second, third):
        reservations.end(ticket)
    assert reservations.reserved() == {}
    assert not reservations.holds(RUN_ID)
