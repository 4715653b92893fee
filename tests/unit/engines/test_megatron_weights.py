"""Llama's weights to Megatron's and back, without Megatron."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.message_texts import Messages
from xray_runtime.engines.trainers.megatron.config import MegatronConfig
from xray_runtime.engines.trainers.megatron.weights import Fused, adapter_part, check_llama, llama, padded_vocabulary
from xray_runtime.models.heads import HeadedLM

CPU = torch.device("cpu")


def config(**changes: Any) -> LlamaConfig:
    sizes = {
        "vocab_size": 13,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,  # not hidden size ÷ heads, as in some Llamas
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**(sizes | changes))


def tensors(shape: LlamaConfig) -> dict[str, Tensor]:
    lm = LlamaForCausalLM(shape)
    return {name: torch.randn(p.shape) for name, p in lm.named_parameters()}


def cut(fused: Fused, pieces: list[Tensor], size: int) -> list[Tensor]:
    found = []
    for rank in range(size):
        spans = fused.spans(rank, size)
        slices = [p.narrow(fused.dim or 0, low, high - low) for p, (low, high) in zip(pieces, spans, strict=True)]
        found.append(fused.join(slices, size))
        # A part says which slices it is of.
        assert all(torch.equal(a, b) for a, b in zip(fused.split(found[-1], rank, size), slices, strict=True))
    return found


def test_query_key_and_value_heads_are_interleaved_by_group() -> None:
    """Four query heads of two rows, two key-value heads: heads 0 and 1 read group 0."""
    q, k, v = torch.arange(8.0)[:, None], torch.arange(10.0, 14.0)[:, None], torch.arange(20.0, 24.0)[:, None]
    fused = Fused(("q", "k", "v"), ((8, 1), (4, 1), (4, 1)), dim=0, blocks=2)
    whole = [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]
    assert cut(fused, [q, k, v], 1)[0].flatten().tolist() == whole
    assert [part.flatten().tolist() for part in cut(fused, [q, k, v], 2)] == [whole[:8], whole[8:]]


def test_each_peer_has_its_gate_above_its_up_projection() -> None:
    gate, up = torch.arange(4.0)[:, None], torch.arange(10.0, 14.0)[:, None]
    fused = Fused(("gate", "up"), ((4, 1), (4, 1)), dim=0, blocks=2)
    assert [part.flatten().tolist() for part in cut(fused, [gate, up], 2)] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_the_vocabulary_is_padded_and_cut_off_again() -> None:
    rows = torch.arange(1.0, 6.0)[:, None]
    fused = Fused(("embedding",), ((5, 1),), dim=0, blocks=2)
    parts = cut(fused, [rows], 2)
    assert [part.flatten().tolist() for part in parts] == [[1, 2, 3], [4, 5, 0]]
    assert torch.equal(fused.whole(parts)[0], rows)
    assert padded_vocabulary(5, 2) == 6


def test_an_adapter_is_split_where_its_matrix_is() -> None:
    """Four query heads of two rows in two groups: a peer has a group's rows of B and of the norms, and the whole A."""
    queries = Fused(("q", "k"), ((8, 3), (4, 3)), dim=0, blocks=2)
    down = Fused(("down",), ((3, 6),), dim=1, blocks=2)
    a, b, norms = torch.arange(6.0).view(2, 3), torch.arange(16.0).view(8, 2), torch.arange(8.0)
    shapes = {"lora_A.weight": a, "lora_B.weight": b, "magnitude": norms}
    parts = {name: adapter_part(queries, f"q.{name}", tuple(t.shape)) for name, t in shapes.items()}
    own = {name: fused.own(shapes[name], 1, 2).tolist() for name, fused in parts.items()}
    assert own == {"lora_A.weight": a.tolist(), "lora_B.weight": b[4:].tolist(), "magnitude": [4, 5, 6, 7]}
    wide, tall = torch.arange(12.0).view(2, 6), torch.arange(6.0).view(3, 2)
    columns = adapter_part(down, "down.lora_A.weight", (2, 6))
    assert columns.own(wide, 1, 2).tolist() == wide[:, 3:].tolist()
    assert adapter_part(down, "down.lora_B.weight", (3, 2)).own(tall, 1, 2).tolist() == tall.tolist()
    assert torch.equal(columns.whole([columns.own(wide, rank, 2) for rank in range(2)])[0], wide)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("peers", "stages"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_there_and_back_is_the_same_bit_for_bit(peers: int, stages: int, tied: bool) -> None:
    shape = config(tie_word_embeddings=tied)
    there = tensors(shape)
    back: dict[str, Tensor] = {}
    for stage in range(stages):
        layers = range(4 * stage // stages, 4 * (stage + 1) // stages)
        for fused in llama(shape, layers, peers).values():
            assert fused.shapes == tuple(tuple(there[piece].shape) for piece in fused.pieces)
            pieces = fused.whole(cut(fused, [there[piece] for piece in fused.pieces], peers))
            if fused.borrowed:
                assert tied
                assert torch.equal(pieces[0], there["model.embed_tokens.weight"])
                continue
            assert back.keys().isdisjoint(fused.pieces)
            back |= dict(zip(fused.pieces, pieces, strict=True))
    assert back.keys() == there.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in there.items())


def test_the_last_stage_borrows_a_tied_embedding_and_has_the_head() -> None:
    last = llama(config(), range(2, 4), 1, scalar=True)
    assert last["output_layer.weight"].borrowed
    assert last["scalar.weight"].shapes == ((1, 8),)
    assert "embedding.word_embeddings.weight" not in last
    assert last["decoder.layers.0.mlp.linear_fc2.weight"].pieces == ("model.layers.2.mlp.down_proj.weight",)
    assert "scalar.weight" not in llama(config(), range(2), 1, scalar=True)


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({}, {"tensor_parallel": 4, "num_workhorses": 4}),
        ({}, {"pipeline_parallel": 3, "num_workhorses": 3}),
        ({"attention_bias": True}, {}),
        ({"hidden_act": "gelu"}, {}),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, {}),
    ],
)
def test_models_megatron_cannot_train_are_refused(
    changes: dict[str, Any], layout: dict[str, Any], message_texts: Messages
) -> None:
    module = HeadedLM(LlamaForCausalLM(config(**changes)))
    with message_texts.raises(ValueError):
        check_llama(module, MegatronConfig(**layout))


def test_other_families_and_frozen_trunks_are_refused() -> None:
    shape = config()
    sizes = {name: getattr(shape, name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    other = HeadedLM(Qwen2ForCausalLM(Qwen2Config(**sizes, num_hidden_layers=1, num_attention_heads=2)))
    with pytest.raises(ValueError, match=r"engine\.library: 'megatron' is not allowed for this Qwen2"):
        check_llama(other, MegatronConfig())
    trunk = HeadedLM(LlamaForCausalLM(shape), trainable_layers=1)
    with pytest.raises(ValueError, match=r"'megatron' is not allowed with base\.trainable_layers"):
        check_llama(trunk, MegatronConfig())
    check_llama(HeadedLM(LlamaForCausalLM(shape)), MegatronConfig())
