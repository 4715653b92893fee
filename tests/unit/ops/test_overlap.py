"""Phases that overlap: with a lag the generator samples while the other models score and learn, on GPUs of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from xray.flows.lifecycle_graph import recorded_graph
from xray_runtime.cluster.pool.machine import Machine
from xray_runtime.methods.loading import validate
from xray_runtime.ops.planner.auto import GraphPlan
from xray_runtime.ops.planner.cost import GPUS
from xray_runtime.ops.planner.description import _seconds_text, as_dict
from xray_runtime.ops.planner.plan import Placement, Plan
from xray_runtime.ops.planner.search import search
from xray_runtime.ops.planner.stage_workload import stage_workload
from xray_runtime.ops.planner.workload import Workload, from_parameters

H100 = GPUS[2]


def machine(count: int) -> Machine:
    return Machine(num_devices=count, memory_bytes=H100.memory_bytes, devices_per_node=8)


def workload(**changes: Any) -> Workload:
    """Policy and generator of 8 × 10⁹ parameters, the generator in one piece."""
    given = from_parameters(8e9, 2048)
    kept = (role for role in given.roles if role.name in ("policy", "generator"))
    roles = tuple(replace(role, in_one_piece=role.use == "sampled") for role in kept)
    open_choices = given.open_choices - {"sleep"}
    return replace(given, roles=roles, open_choices=open_choices, micro_batch_tokens=4096, **changes)


def plan(placement: Placement, ahead: bool, **seconds: float) -> Plan:
    found = search(workload(), machine(8))
    return replace(
        found, placement=placement, workload=replace(found.workload, samples_ahead=ahead), seconds={**seconds}
    )


@pytest.mark.parametrize(
    ("generate", "ahead", "placement", "expected", "bottleneck"),
    [
        (9.0, True, "separate", 1 + 9, "generate"),
        (6.0, True, "separate", 1 + 3 + 4, "update"),
        (6.0, False, "separate", 1 + 6 + 3 + 4, "generate"),
        (6.0, True, "colocated", 1 + 6 + 3 + 4, "generate"),
    ],
)
def test_the_longer_side_counts(
    generate: float, ahead: bool, placement: Placement, expected: float, bottleneck: str
) -> None:
    found = plan(placement, ahead, generate=generate, score=3.0, update=4.0, sync=1.0)
    assert found.iteration_s == expected
    assert found.bottleneck == bottleneck
    beside = "generate while the others score and update" in _seconds_text(found)
    assert beside == (ahead and placement == "separate")
    content = as_dict(GraphPlan({"ppo": found}), [], None)
    assert content["iteration_seconds"] == expected
    assert content["overlaps"] == beside


def test_the_search_balances_both_sides() -> None:
    """Against the best plan of every share of the GPUs, each planned by itself."""
    ahead = workload(samples_ahead=True)
    found = search(ahead, machine(32))
    assert found.placement == "separate"
    by_share = [
        search(
            replace(ahead, generator_replicas=count, open_choices=ahead.open_choices - {"generator_replicas"}),
            machine(32),
        ).iteration_s
        for count in range(4, 32, 4)
    ]
    assert found.iteration_s == pytest.approx(min(by_share), rel=0.02)
    # Without a lag the same GPUs would take longer, and all of them take turns.
    plain = search(workload(), machine(32))
    assert plain.placement == "colocated"
    assert found.iteration_s < plain.iteration_s
    seconds = found.seconds
    others = seconds["score"] + seconds["update"]
    assert 0.5 < seconds["generate"] / others < 2
    assert found.iteration_s == pytest.approx(seconds["sync"] + max(seconds["generate"], others))


def test_a_lag_is_planned() -> None:
    def of(lag: int) -> Workload:
        stages = [{"method": "grpo", "prompts_per_iteration": 4, "lag": lag}]
        base = {"kind": "pretrained", "model": "Qwen/Qwen3-0.6B"}
        rewards = [{"verifier": {"kind": "regex", "pattern": "x"}}]
        written = {"base": base, "preferences": None, "reward": None, "rewards": rewards, "ppo": {"stages": stages}}
        graph = recorded_graph(validate({**written, "gold": None, "data": {"source": "chitchat"}}))
        made = stage_workload(graph.calls["ppo-1"], "cuda")
        assert made is not None
        return made

    assert [of(lag).samples_ahead for lag in (0, 1, 4)] == [False, True, True]
