"""Tensors of files are written where transformers keeps them in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

from tests.unit.models.families import model
from xray_runtime.models.published_names import PublishedNames

EXPERTS: dict[str, Any] = {
    **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "shared_intermediate_size": 16},
}
MAMBA = {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("mixtral", EXPERTS),
        ("qwen3_moe", EXPERTS),
        ("granitemoehybrid", EXPERTS | MAMBA),
        ("llama", {}),
        ("apertus", {}),
    ],
    ids=["Mixtral", "Qwen3-MoE", "Granite 4", "Llama", "Apertus"],
)
def test_tensors_of_files_are_written_into_parameters(kind: str, fields: dict[str, Any]) -> None:
    """Experts of a layer are one tensor in memory; the weights of a Llama have the names of its files, and so have the
    constants of an Apertus's activations."""
    lm = model(kind, **fields)
    before = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    files = revert_weight_conversion(lm, before)
    assert (files.keys() == before.keys()) == (kind in ("llama", "apertus"))
    names = PublishedNames(lm)
    for tensor in lm.state_dict().values():
        tensor.zero_()
    for name, tensor in files.items():
        names.write(name, tensor)
    assert all(torch.equal(tensor, before[name]) for name, tensor in lm.state_dict().items())
    with pytest.raises(AttributeError):
        names.write("model.layers.0.mlp.experts.9.w1.weight", torch.zeros(1))
