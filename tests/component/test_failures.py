"""One of two real ranks is killed, stopped, raises, or does not come: the cause is named, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.component.models import text
from tests.component.processes import gone, open_models, pids
from xray_runtime.cluster import heartbeat
from xray_runtime.cluster.health import AFTERMATH_SECONDS, HEARTBEAT_SECONDS, WorkhorseError
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.data.batch import StepTotals
from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.cores import load
from xray_runtime.kernel.errors import may_retry, root_cause
from xray_runtime.methods.sft.config import SFTConfig
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Component, SFTObjective, Terms

LIMIT_SECONDS = 5.0
COLLECTIVE_SECONDS = 4.0
RUNTIME = RuntimeConfig(threads=1, device="cpu", hang_timeout_s=LIMIT_SECONDS)
BUSY_SECONDS = 20.0
"""What a machine with other work to do may add to any limit."""


@dataclass(frozen=True)
class Moody(SFTObjective):
    """An objective whose rank 1 does in a step what `totals` says, while rank 0 waits for it in an all-reduce."""

    def components(self, module: HeadedLM) -> Any:
        return (*super().components(module), Mood())


class Mood(Component[Any]):
    """A component that adds nothing."""

    def coef(self, totals: StepTotals) -> float:
        if isinstance(totals, Moods):
            if totals.blind:
                # As under NCCL, whose calls return at once: no frame tells who waits.
                heartbeat.COLLECTIVES = ()
            if torch.distributed.get_rank() == 1:
                time.sleep(totals.sleep)
                if totals.fails:
                    raise KeyError("rank one is moody")
        return 0.0

    def terms(self, forward: Any, totals: StepTotals) -> Terms:
        return Terms(forward.hidden.detach())


@dataclass(frozen=True, kw_only=True)
class Moods(StepTotals):
    blind: float = 0.0
    sleep: float = 0.0
    fails: float = 0.0


@contextmanager
def policy(model: Path, logs: Path) -> Iterator[tuple[Any, list[int]]]:
    """(WholeModel of two ranks that has made a step, their process ids)."""
    training = SFTConfig(engine=EngineConfig(num_workhorses=2))
    with open_models(RUNTIME, logs, {"policy": ModelSpec(model, Moody(), training=training)}) as models:
        ray.get(models["policy"].train.remote(text(), StepTotals(tokens=10.0), 1e-3))
        yield models["policy"], pids(models["policy"])


def step(model: Any, **mood: float) -> Any:
    return model.train.remote(text(), Moods(tokens=10.0, **mood), 1e-3)


def _shorten_limit(model: Any) -> None:
    model._health._collective_timeout_s = COLLECTIVE_SECONDS


@pytest.mark.parametrize(
    ("number", "within", "says"),
    [
        (signal.SIGKILL, AFTERMATH_SECONDS, r"died: .*exit detail"),
        (signal.SIGSTOP, LIMIT_SECONDS + 2 * HEARTBEAT_SECONDS + AFTERMATH_SECONDS, r"sent no heartbeat for \d+ s"),
    ],
    ids=["killed", "stopped"],
)
def test_a_rank_that_is_lost_in_a_step(
    cluster: None, tiny_model: Path, tmp_path: Path, number: signal.Signals, within: float, says: str
) -> None:
    def lose_one() -> None:
        with policy(tiny_model, tmp_path) as (model, processes):
            victims.extend(processes)
            ref = step(model, sleep=3.0)
            time.sleep(1.0)
            os.kill(processes[1], number)
            ray.get(ref, timeout=patience)

    victims: list[int] = []
    # The product's limits grow with the load too.
    patience = (within + BUSY_SECONDS) * load()
    with pytest.raises(WorkhorseError, match=rf"Workhorse 1 of 2 of 'policy' \(.+, pid \d+\) {says}") as caught:
        lose_one()
    assert f"pid {victims[1]})" in str(caught.value)
    assert f"last lines of {tmp_path}/policy-1.log:" in str(caught.value)
    assert may_retry(caught.value)
    assert all(map(gone, victims))
    assert not ray.util.placement_group_table() or all(
        group["state"] == "REMOVED" for group in ray.util.placement_group_table().values()
    )


def test_a_rank_that_raises_is_distinguished_from_those_that_wait(
    cluster: None, tiny_model: Path, tmp_path: Path
) -> None:
    def upset_one() -> None:
        with policy(tiny_model, tmp_path) as (model, processes):
            victims.extend(processes)
            ray.get(step(model, sleep=1.0, fails=1.0), timeout=AFTERMATH_SECONDS + BUSY_SECONDS)

    victims: list[int] = []
    with pytest.raises(KeyError, match="rank one is moody") as caught:
        upset_one()
    [note] = root_cause(caught.value).__notes__
    assert note.startswith("in Workhorse 1 of 2 of 'policy' (")
    assert f"last lines of {tmp_path}/policy-1.log:" in note
    assert all(map(gone, victims))


def test_a_rank_that_does_not_come_to_a_collective(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    """With gloo, whose frames show who waits, and where frames say nothing; both at once, since each takes a limit."""

    def wait_for_one(mood: dict[str, float]) -> None:
        with policy(tiny_model, tmp_path / str(len(mood))) as (model, processes):
            victims.extend(processes)
            # Only now: on a busy machine one rank starts well after the other, and meets it in a collective.
            ray.get(model.__ray_call__.remote(_shorten_limit))
            # It answers heartbeats: not it stands still, its peers do.
            ray.get(step(model, sleep=120.0 * load(), **mood), timeout=100.0 * load())

    victims: list[int] = []
    says = (
        r"Workhorse 0 of 2 of 'policy' \(.+\) waited too long in a collective for Workhorse 1 of 2 of 'policy' \(.+\), "
        r"which is at Mood.coef in .*test_failures.py:\d+: given up after \d+ s; "
        r"parts of the common work that were done: rank 0 \d+, rank 1 \d+"
    )
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(wait_for_one, mood) for mood in ({}, {"blind": 1.0})]
        for failure in waiting:
            with pytest.raises(WorkhorseError, match=says):
                failure.result()
    assert len(victims) == 4
    assert all(map(gone, victims))
