"""A row that a Workhorse cannot hold is named with what would hold it, before any model is opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.message_texts import Messages
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.pool.machine import GIB, Machine
from xray_runtime.methods.sft.config import SFTConfig
from xray_runtime.models.objectives import SFTObjective
from xray_runtime.ops.planner.long_rows import too_long

H, L, HEADS, MLP, V = 1024, 8, 8, 4096, 1000
"""Hidden size, layers, heads (all of them for keys, too), intermediate size, vocabulary."""
PARAMETERS = V * H + L * (4 * H * H + 3 * H * MLP + 2 * H) + H
"""Embedding (tied), attention, MLP and two norms a layer, the last norm."""
KEPT = 2 * (12 * H + 4) + 4 * 5 * H + 4 * HEADS + 16 * MLP
"""Bytes of a token's activations in a layer, in float32 (docs/planning.md)."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    fields = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": V, "hidden_size": H,
        "num_hidden_layers": L, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "intermediate_size": MLP,
        "max_position_embeddings": 65_536, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


def spec(model: Path, **engine: Any) -> ModelSpec:
    training = SFTConfig.model_validate({"engine": {"precision": "float32", "micro_batch_tokens": 1024} | engine})
    return ModelSpec(model, SFTObjective(), training=training, trainable_layers=training.trainable_layers)


def gpu(gib: float, count: int = 8) -> Machine:
    return Machine(num_devices=count, memory_bytes=int(gib * GIB))


def found(model: Path, tokens: int, machine: Machine, **engine: Any) -> str | None:
    return too_long(spec(model, **engine), tokens, lambda: machine)


def test_the_row_that_is_too_long_is_told_what_would_hold_it(model: Path, message_texts: Messages) -> None:
    text = found(model, 20_000, gpu(16))
    assert text is not None
    message_texts.check(text)


def test_the_longest_row_follows_from_the_formulas(model: Path) -> None:
    """Weights, gradients and moments (16 bytes a parameter), a process, and what a row keeps."""
    machine = gpu(16)
    fixed = 16 * PARAMETERS + 500_000_000 + 12 * V  # one position's logits
    per_token = L * KEPT + 12 * H + 4
    most = (machine.memory_bytes - fixed) // per_token
    text = found(model, 20_000, machine)
    assert text is not None
    assert f"rows of at most {most:,} in 17.2 GB" in text
    assert found(model, most, machine) is None
    assert found(model, most + 1, machine) is not None


@pytest.mark.parametrize("degree", [2, 4])
def test_what_is_proposed_holds_it(model: Path, degree: int) -> None:
    alone = found(model, 20_000, gpu(16))
    assert alone is not None
    assert "sequence_parallel: 2 with num_workhorses: 2" in alone
    assert found(model, 20_000, gpu(16), sequence_parallel=degree, num_workhorses=degree) is None
    assert found(model, 20_000, gpu(16), activation_checkpointing=True) is None


def test_a_row_within_a_pass_is_no_cause(model: Path) -> None:
    """Neither is one of a model that does not fit at all: other checks say so. The devices are not asked then."""
    assert too_long(spec(model, micro_batch_tokens=20_000), 20_000, lambda: pytest.fail("asked")) is None
    assert found(model, 20_000, gpu(1)) is None


def test_ranks_on_a_cpu_share_its_memory(model: Path) -> None:
    machine = Machine(num_devices=2, memory_bytes=8 * GIB, device="cpu")
    alone = found(model, 20_000, machine)
    assert alone is not None
    assert "activation_checkpointing: true" in alone
    assert "sequence_parallel" not in alone  # two ranks have the same memory together
    assert found(model, 9_000, machine) is None
    assert found(model, 9_000, machine, num_workhorses=2) is not None
