"""The standard cases of docs/planning-table.md, and the configs for GPUs: each has an answer that fits its GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.plan_table import STAGES, Case, answer, cases, graph_of, planned
from tests.unit.ops.recount import recounted
from xray.flows.lifecycle_graph import recorded_graph
from xray_runtime.cluster.pool.machine import GIB, Machine
from xray_runtime.methods.loading import load_config
from xray_runtime.models.family import FAMILIES
from xray_runtime.ops.planner.auto import Changes, plan
from xray_runtime.ops.planner.cost import GPUS

ROOT = Path(__file__).parents[3]
ALL = list(cases())
PAGE = (ROOT / "docs" / "planning-table.md").read_text(encoding="utf-8")


def rows() -> dict[str, list[str]]:
    """First two columns → the cells of a row of the page."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")][1:]
    return {" | ".join(cells[:2]): cells[2:] for cells in lines}


def cell(case: Case) -> str:
    index = [(method, lora) for method in STAGES for lora in (False, True)].index((case.method, case.lora))
    return rows()[f"{case.model.split('/')[1]} | {case.num_gpus} {case.gpu.name}"][index]


def test_every_cell_is_answered() -> None:
    assert len(ALL) == (4 * 2 * 4 + 2 * 3 * 2) * 5 * 2
    for case in ALL:
        assert " s: Z" in cell(case) or cell(case).startswith("no: "), case
        assert cell(case) != "no: ", case


@pytest.mark.parametrize("case", ALL[::29], ids=lambda c: f"{c.model} {c.num_gpus} {c.gpu.name} {c.method} {c.lora}")
def test_the_page_is_what_is_planned_and_fits(case: Case) -> None:
    assert answer(case) == cell(case)
    found = planned(case, graph_of(case), Changes(), case.machine)
    if found.fits:
        assert recounted(found) <= 0.9 * case.gpu.memory_bytes


def test_the_standard_case_of_eight_billion_fits() -> None:
    """Refused until models shared GPUs: 8 × 10⁹ parameters in mixed precision on eight GPUs of 80 GB."""
    for method in STAGES:
        case = Case("Qwen/Qwen3-8B", GPUS[2], 8, method, lora=False)
        found = planned(case, graph_of(case), Changes(), case.machine)
        assert found.fits
        assert not found.offloads
        assert {p.layout.num_devices for p in found.roles} == {8}


@pytest.mark.parametrize(
    ("name", "count", "gib", "parameters"), [("gpu-1", 1, 22, 0.6e9), ("gpu-8", 8, 44, 8.2e9), ("gpu-64", 64, 79, 33e9)]
)
def test_the_configs_for_gpus_are_planned(name: str, count: int, gib: int, parameters: float) -> None:
    graph = recorded_graph(load_config(ROOT / "configs" / f"{name}.yaml"))
    machine = Machine(num_devices=count, memory_bytes=gib * GIB, devices_per_node=min(count, 8))
    found = plan(graph, machine)
    assert found.fits
    assert list(found.stages) == ["sft", "ppo-1", "evaluate"]
    for stage in found.stages.values():
        assert 0.95 * stage.fullest.peak_bytes <= recounted(stage) <= stage.fullest.peak_bytes <= 0.9 * gib * GIB
        assert {p.role.weight_bytes for p in stage.roles} == {2}
        assert {p.layout.num_devices for p in stage.roles} == {count}
    assert found.stages["sft"].roles[0].role.shape.num_parameters == pytest.approx(parameters, rel=0.02)


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES.get(name).beyond is not None])
def test_families_that_are_counted_exactly_can_be_split(family: str, tmp_path: Path) -> None:
    """Plans take this for granted, so that none imports torch."""
    from xray_runtime.engines.trainers.deepspeed.build import can_split

    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 128, "vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **sizes}))
    assert can_split(str(tmp_path)) == (True, True)
