"""Shapes counted from what transformers builds: published sizes of many families, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.message_texts import Messages
from tests.unit.ops.published_configs import PUBLISHED
from xray_runtime.models.config import PretrainedBase
from xray_runtime.models.pretrained_shapes import from_pretrained
from xray_runtime.models.shapes import ModelShape
from xray_runtime.ops.planner.memory import Layout, training_memory

LLAMA: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96} | {
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 64},
    "tie_word_embeddings": True,
}


def shape_of(config: dict[str, Any], directory: Path) -> ModelShape:
    (directory / "config.json").write_text(json.dumps(config))
    return from_pretrained(PretrainedBase(model=str(directory)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_parameter_of_a_published_model_is_counted(name: str, tmp_path: Path) -> None:
    parameters, config = PUBLISHED[name]
    shape = shape_of(config, tmp_path)
    assert shape.num_parameters == parameters
    # The planner's own sums over layers and embeddings have them all.
    weights = training_memory(shape, 4, Layout(), tokens=1, positions=0).weights
    assert weights == 4 * parameters
    assert shape.max_positions in (*config.values(), 2048)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llava"},
        {"model_type": "smolvlm"},
        {"model_type": "mistral3"},
        {"model_type": "gemma3"},
        {"model_type": "gemma4"},
        {"model_type": "qwen3_5"},
        {"model_type": "pixtral"},
        LLAMA | {"quantization_config": {"quant_method": "compressed-tensors"}},
        {"model_type": "nobody-knows"},
        {"model_type": "llama", "hidden_size": "wide"},
        {},
        {"model_type": "mamba", "num_hidden_layers": 2},
    ],
    ids=lambda value: "quantized" if "quantization_config" in value else value.get("model_type", "empty"),
)
def test_models_of_unknown_size_are_refused_in_one_line(
    config: dict[str, Any], tmp_path: Path, message_texts: Messages
) -> None:
    with message_texts.raises(ValueError):
        shape_of(config, tmp_path)
