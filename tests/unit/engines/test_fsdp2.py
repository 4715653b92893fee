"""FSDP2 without a process group: what configs and the planner know of it, and Muon's orthogonalization."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from xray.flows.lifecycle_graph import recorded_graph
from xray_runtime.cluster.pool.machine import Machine
from xray_runtime.engines.layouts import EngineConfig, FrozenConfig
from xray_runtime.engines.trainers.fsdp2.muon import COEFFICIENTS, NUM_ITERATIONS, orthogonalized
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.methods.loading import validate
from xray_runtime.models.shapes import ModelShape
from xray_runtime.ops.planner.auto import Changes, choose_layouts
from xray_runtime.ops.planner.memory import Layout, Options, training_memory
from xray_runtime.ops.planner.model_states import sharding_of

FSDP2 = {"library": "fsdp2"}
GIB = 2**30


@pytest.mark.parametrize(
    ("section", "fields", "message"),
    [
        ("engine", {"tensor_parallel": 2, "num_workhorses": 2}, "engine: tensor_parallel = 2 is not supported with"),
        ("engine", {"pipeline_parallel": 2, "num_workhorses": 2}, "engine: pipeline_parallel = 2 is not supported"),
        ("engine", {"zero_stage": 1}, "engine.zero_stage"),
        ("engine", {"offload": "cpu"}, "engine: offload is not supported with library = 'fsdp2' (deepspeed can)"),
        ("engine", {"optimizer": "sgd"}, "engine.optimizer"),
        ("frozen", {"tensor_parallel": 2, "num_workhorses": 2}, "frozen: tensor_parallel = 2 is not supported with"),
    ],
)
def test_what_it_cannot_is_refused_in_one_line(section: str, fields: dict[str, Any], message: str) -> None:
    layout = {section: FSDP2 | fields}
    with pytest.raises(ConfigError) as refused:
        validate(layout if section == "frozen" else {"sft": layout})
    [line] = str(refused.value).splitlines()
    assert message in line


def test_muon_is_a_field_of_this_trainer_alone() -> None:
    with pytest.raises(ConfigError, match=r"optimizer is not supported with library = 'deepspeed' \(fsdp2 can\)"):
        validate({"sft": {"engine": {"optimizer": "muon"}}})


def test_precision_is_chosen_by_the_device_and_sharding_is_at_least_level_two() -> None:
    engine = EngineConfig(**FSDP2)
    assert engine.resolved("cuda").precision == "bfloat16"
    assert engine.resolved("cpu").precision == "float32"
    assert (engine.sharding_level, engine.least_sharding_level) == (3, 2)
    assert FrozenConfig(library="fsdp2", zero_stage=3, num_workhorses=2).plugs() == (
        "xray_runtime.engines.trainers.fsdp2",
    )


def test_the_planner_shards_no_further_than_it_must() -> None:
    """6.7B parameters take 16 bytes each: at level 2 all weights are gathered in a pass, at level 3 some."""
    base = {"kind": "fresh", "hidden_size": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 32}
    config = validate(
        {
            "base": base | {"intermediate_size": 11008},
            "sft": {"engine": FSDP2},
            "runtime": {"parallel": "auto", "device": "cuda"},
        }
    )
    call = recorded_graph(config).calls["sft"]
    levels = {}
    for gib in (80, 24):
        chosen, text = choose_layouts(call, Machine(num_devices=8, memory_bytes=gib * GIB))
        engine: Any = chosen.config.model_dump()["engine"]
        assert text is not None
        assert (engine["library"], engine["num_workhorses"], engine["tensor_parallel"]) == ("fsdp2", 8, 1)
        levels[gib] = engine["zero_stage"]
    assert levels == {80: 2, 24: 3}
    with pytest.raises(ConfigError, match=r"--offload is not supported with sft\.engine\.library = 'fsdp2'"):
        Changes(offload=True).of_call(call)


def test_two_layers_are_gathered_and_no_copies_are_kept() -> None:
    """h = 64, f = 128, V = 100, 10 layers, float32 on 2 ranks. A layer: 4·64² + 3·64·128 + 2·64 = 41,088 parameters;
    all: 410,880 + 2·6,400 + 64 = 423,744. Weights, gradients: 4 bytes each / 2; two moments: 8 / 2. Gathered: 423,744 −
    8·41,088 = 95,040, 4 bytes each."""
    shape = ModelShape(
        num_layers=10, hidden_size=64, num_heads=2, num_kv_heads=2, head_size=32, intermediate_size=128,
        vocab_size=100, tied=False,
    )  # fmt: skip
    options = Options(sharding=sharding_of("fsdp2"))
    memory = training_memory(shape, 4, Layout(zero_stage=3, dp=2), tokens=1, positions=1, options=options)
    assert (memory.weights, memory.gradients, memory.optimizer) == (847_488, 847_488, 1_694_976)
    assert memory.buffers == 4 * 95_040
    assert memory.kept == 0


@pytest.mark.parametrize("shape", [(6, 6), (5, 8), (8, 3)])
def test_orthogonalization_maps_the_singular_values_alone(shape: tuple[int, int]) -> None:
    """Against the singular value decomposition in float64: each value σ / ‖M‖ goes five times through the quintic."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum().sqrt()
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        values = a * values + b * values**3 + c * values**5
    expected = u @ torch.diag(values) @ v
    np.testing.assert_allclose(orthogonalized(matrix), expected, atol=1e-12)
    np.testing.assert_allclose(orthogonalized(matrix.float()), expected, atol=1e-5)
    # Rows by themselves are another matrix, so that sharded rows must be gathered first.
    apart = torch.cat([orthogonalized(rows) for rows in matrix.chunk(2)])
    assert (apart - expected).abs().max() > 0.05


def test_nothing_is_orthogonalized_to_nothing() -> None:
    assert orthogonalized(torch.zeros(3, 2)).tolist() == [[0.0, 0.0]] * 3
