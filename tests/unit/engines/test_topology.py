"""Ranks of a tensor × pipeline × sequence × data grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.message_texts import Messages
from tests.unit.conftest import TINY
from tests.unit.models.families import model
from xray_runtime.engines.adapted_stages import check_adapted_stages
from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.engines.topology import Topology
from xray_runtime.models.adapters import Adapters
from xray_runtime.models.causal_lm import fresh_llama, save_model
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.lora import LoRAConfig


def test_ranks_of_two_by_two_by_two() -> None:
    grid = Topology.of(EngineConfig(tensor_parallel=2, pipeline_parallel=2, num_workhorses=8))
    assert [grid.stage(r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [grid.data_rank(r) for r in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [grid.tensor_rank(r) for r in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    # One rank a replica answers: the last stage's first slice.
    assert [r for r in range(8) if grid.reports(r)] == [4, 6]
    assert [grid.rank(grid.stage(r), grid.data_rank(r), grid.tensor_rank(r)) for r in range(8)] == list(range(8))


def test_ranks_that_share_rows_are_neighbours() -> None:
    layout = EngineConfig(sequence_parallel=2, num_workhorses=6)
    grid = Topology.of(layout)
    assert (layout.data_parallel, layout.num_copies, layout.is_split) == (3, 6, False)
    assert [grid.data_rank(r) for r in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [grid.sequence_rank(r) for r in range(6)] == [0, 1, 0, 1, 0, 1]
    assert [r for r in range(6) if grid.reports(r)] == [0, 2, 4]
    assert [grid.rank(0, grid.data_rank(r), 0, grid.sequence_rank(r)) for r in range(6)] == list(range(6))


def test_layers_are_divided_evenly() -> None:
    assert [list(Topology(pipeline=3).layers(s, 7)) for s in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert list(Topology().layers(0, 2)) == [0, 1]


@pytest.mark.parametrize(
    ("targets", "stages"),
    [(["model.layers.0.self_attn.q_proj"], 2), (["layers.1.mlp.up_proj", "layers.3.mlp.up_proj"], 3)],
)
def test_a_stage_without_adapters_is_refused(
    targets: list[str], stages: int, tmp_path: Path, tiny_tokenizer: Any, message_texts: Messages
) -> None:
    """Its peers would wait for its gradients."""
    lm: Any = fresh_llama(TINY.model_copy(update={"num_layers": 4}), tiny_tokenizer, seed=2)
    save_model(lm, tiny_tokenizer, tmp_path)
    module = HeadedLM(lm, adapters=Adapters(lm, LoRAConfig(rank=2, target_modules=targets), tmp_path, seed=3))
    with message_texts.raises(ValueError):
        check_adapted_stages(module, stages, "engine")
    check_adapted_stages(module, 1, "engine")
    if stages == 3:
        check_adapted_stages(module, 2, "engine")


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "phi3", "gpt_oss"])
def test_models_that_autotp_cannot_split_are_refused_in_one_line(family: str, message_texts: Messages) -> None:
    from xray_runtime.engines.trainers.deepspeed.tensor import check_split

    options = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
    with message_texts.raises(ValueError):
        # Three experts cannot be shared by two peers.
        experts = {"num_experts": 3, "num_local_experts": 3} if family == "mixtral" else {}
        check_split(model(family, **(options if family == "phi3" else experts)), 2, "engine")
