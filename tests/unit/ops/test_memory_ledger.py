"""No event of an iteration needs more than a GPU has: a ledger of every plan, of what the planner says models hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plan_table import Case, cases, graph_of, planned
from tests.unit.ops.recount import ledger, recounted
from xray_runtime.ops.planner.auto import Changes
from xray_runtime.ops.planner.cost import GPUS
from xray_runtime.ops.planner.plan import Plan

ROOT = Path(__file__).parents[3]
NODE = 8


def plan_of_case(case: Case) -> Plan:
    return planned(case, graph_of(case), Changes(), case.machine)


def fits_whenever(found: Plan) -> None:
    """No event passes the planned peak, nor the usable memory of a GPU; nor is much planned that no event needs."""
    peak = recounted(found)
    assert 0.95 * found.fullest.peak_bytes <= peak <= found.fullest.peak_bytes <= 0.9 * found.machine.memory_bytes


@pytest.mark.parametrize(
    "gpu", [pytest.param(gpu, marks=pytest.mark.long if 0 < n < 3 else (), id=gpu.name) for n, gpu in enumerate(GPUS)]
)
def test_every_standard_case_keeps_to_its_gpus(gpu: object) -> None:
    fitting = [found for case in cases() if case.gpu == gpu and (found := plan_of_case(case)).fits]
    assert len(fitting) > 30
    for found in fitting:
        fits_whenever(found)


def test_a_sync_finds_both_models_awake() -> None:
    """Where both sleep in turn, the sync is the only event with weights of both on the GPU."""
    both = next(found for case in cases() if (found := plan_of_case(case)).fits and found.workload.trainer_sleeps)
    [generator] = [p.memory for p in both.roles if p.role.use == "sampled"]
    policy = both.roles[[p.role.use for p in both.roles].index("trained")].memory
    events = [held for event, held in ledger(both, both.roles) if event == "sync"]
    assert len(events) == 2
    assert events[0]["policy"] == policy.weights + policy.optimizer + policy.kept + policy.process + policy.syncing
    assert events[0]["generator"] == generator.weights + generator.graphs + generator.process + generator.syncing
    assert policy.syncing >= 2**30
    assert sum(events[0].values()) <= both.machine.usable_bytes
