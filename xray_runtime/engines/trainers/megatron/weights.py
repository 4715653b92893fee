"""Convert Llama's weights to Megatron-core's names, fused matrices and tensor-parallel parts, and back.

Pure tensor code: Megatron itself is not imported.

One rule makes every Megatron parameter. Its Hugging Face tensors ("pieces") are each split along `dim` into the same
number of blocks; blocks with the same number are concatenated in order of pieces; each peer gets a range of numbers:

    linear_qkv   one block a key-value head   q₀ k₀ v₀ | q₁ k₁ v₁ | …   (q₀: the query heads that share k₀ and v₀)
    linear_fc1   one block a peer             gate₀ up₀ | gate₁ up₁ | …
    all others   one piece, one block a peer

The vocabulary is padded with zeros to a multiple of the number of peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.models.family import Heads, HFConfig, family_of
from xray_runtime.models.heads import HeadedLM

PLAIN_ROPE = ("default", "linear", "llama3")
"""Rotary embeddings whose frequencies do not depend on the sequence."""


def check_llama(module: HeadedLM, engine: EngineConfig) -> None:
    """Raises ValueError if Megatron cannot train the model under this layout; names the field."""
    config, refused = module.lm.config, "engine.library: 'megatron' is not allowed"
    if module.has_trunk:
        raise ValueError(f"{refused} with base.trainable_layers: it trains whole models")
    if not family_of(config.model_type).megatron(config) or config.hidden_act != "silu":
        raise ValueError(
            f"{refused} for this {type(module.lm).__name__}: it supports only Llamas without biases, with SiLU"
        )
    if module.lm.model.rotary_emb.rope_type not in PLAIN_ROPE:
        raise ValueError(f"{refused} with the model's rotary embedding: it must be one of {', '.join(PLAIN_ROPE)}")
    tensor, stages = engine.tensor_parallel, engine.pipeline_parallel
    parts = (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size)
    if any(part % tensor for part in parts):
        raise ValueError(
            f"engine.tensor_parallel: {tensor} is not allowed: it must divide the model's {parts[0]} heads, {parts[1]} "
            f"key-value heads and intermediate size {parts[2]}"
        )
    if config.num_hidden_layers % stages:
        raise ValueError(
            f"engine.pipeline_parallel: {stages} is not allowed: with library 'megatron' it must divide the model's "
            f"{config.num_hidden_layers} layers"
        )


@dataclass(frozen=True)
class Fused:
    """One Megatron parameter: its pieces and how they are split."""

    pieces: tuple[str, ...]
    """Hugging Face names."""
    shapes: tuple[tuple[int, ...], ...]
    dim: int | None = None
    """Dimension of the split; None: every peer has it whole."""
    blocks: int = 1
    """Number of blocks of each piece: a multiple of the number of peers."""
    borrowed: bool = False
    """Whether it is the last pipeline stage's copy of a tied embedding, which the first stage exports and saves."""

    def spans(self, rank: int, size: int) -> list[tuple[int, int]]:
        """The slice along `dim` (0 where nothing is split) of each piece that tensor-parallel peer `rank` has."""
        if self.dim is None:
            return [(0, shape[0]) for shape in self.shapes]
        mine = self.blocks // size
        spans = []
        for shape in self.shapes:
            width = shape[self.dim]
            block = -(-width // self.blocks)
            spans.append((min(block * mine * rank, width), min(block * mine * (rank + 1), width)))
        return spans

    def own(self, piece: Tensor, rank: int, size: int) -> Tensor:
        """A peer's slice of the only piece."""
        ((low, high),) = self.spans(rank, size)
        return piece.narrow(self.dim or 0, low, high - low).contiguous()

    def join(self, slices: Sequence[Tensor], size: int) -> Tensor:
        """A peer's part of the parameter from its slices of the pieces."""
        if self.dim is None:
            return slices[0]
        mine = self.blocks // size
        widths = [-(-shape[self.dim] // self.blocks) * mine for shape in self.shapes]
        split = [_padded(s, self.dim, width).chunk(mine, self.dim) for s, width in zip(slices, widths, strict=True)]
        return torch.cat([blocks[number] for number in range(mine) for blocks in split], self.dim)

    def split(self, part: Tensor, rank: int, size: int) -> list[Tensor]:
        """A peer's slices of the pieces from its part of the parameter."""
        if self.dim is None:
            return [part]
        widths = [-(-shape[self.dim] // self.blocks) for shape in self.shapes]
        blocks = part.split(widths * (self.blocks // size), self.dim)
        each = [torch.cat(blocks[number :: len(widths)], self.dim) for number in range(len(widths))]
        spans = self.spans(rank, size)
        return [s.narrow(self.dim, 0, high - low) for s, (low, high) in zip(each, spans, strict=True)]

    def whole(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The whole pieces from the parts of all peers."""
        if self.dim is None:
            return [parts[0]]
        each = [self.split(part, rank, len(parts)) for rank, part in enumerate(parts)]
        return [torch.cat(slices, self.dim) for slices in zip(*each, strict=True)]


def adapter_part(matrix: Fused, name: str, shape: tuple[int, ...]) -> Fused:
    """The parameter of an adapter beside one of the pieces of `matrix`: its A [rank, in], B [out, rank] or norms [out].

    Args:
        name: Hugging Face's name of the layer, and the part.
    """
    by_rows = matrix.dim == 0
    is_split = name.endswith(".lora_A.weight") != by_rows
    return Fused((name,), (shape,), matrix.dim if is_split else None, matrix.blocks)


def _padded(piece: Tensor, dim: int, width: int) -> Tensor:
    shape = list(piece.shape)
    shape[dim] = width - shape[dim]
    return torch.cat([piece, piece.new_zeros(shape)], dim) if shape[dim] else piece


def padded_vocabulary(vocab_size: int, peers: int) -> int:
    """Rows of the embedding over all peers."""
    return -(-vocab_size // peers) * peers


def llama(config: HFConfig, layers: range, peers: int, *, scalar: bool = False) -> dict[str, Fused]:
    """Megatron's name → its parameter, for the pipeline stage with `layers` of a Llama.

    Args:
        config: the model's `LlamaConfig`.
        peers: tensor-parallel degree.
        scalar: whether the last stage has the scalar head of a `HeadedLM`.
    """
    hidden, wide, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    queries, groups, head = Heads.of(config)
    heads = queries * head

    def split(dim: int, blocks: int, **pieces: tuple[int, ...]) -> Fused:
        return Fused(tuple(pieces), tuple(pieces.values()), dim, blocks)

    def kept(name: str, *shape: int) -> Fused:
        return Fused((name,), (shape,))

    stage: dict[str, Fused] = {}
    embedding = Fused(("model.embed_tokens.weight",), ((vocab, hidden),), 0, peers)
    if layers.start == 0:
        stage["embedding.word_embeddings.weight"] = embedding
    for local, number in enumerate(layers):
        ours, theirs = f"decoder.layers.{local}.", f"model.layers.{number}."
        attention, mlp = f"{theirs}self_attn.", f"{theirs}mlp."
        stage |= {
            f"{ours}input_layernorm.weight": kept(f"{theirs}input_layernorm.weight", hidden),
            f"{ours}self_attention.linear_qkv.weight": split(
                0,
                groups,
                **{
                    f"{attention}q_proj.weight": (heads, hidden),
                    f"{attention}k_proj.weight": (groups * head, hidden),
                    f"{attention}v_proj.weight": (groups * head, hidden),
                },
            ),
            f"{ours}self_attention.linear_proj.weight": split(
                1, peers, **{f"{attention}o_proj.weight": (hidden, heads)}
            ),
            f"{ours}pre_mlp_layernorm.weight": kept(f"{theirs}post_attention_layernorm.weight", hidden),
            f"{ours}mlp.linear_fc1.weight": split(
                0, peers, **{f"{mlp}gate_proj.weight": (wide, hidden), f"{mlp}up_proj.weight": (wide, hidden)}
            ),
            f"{ours}mlp.linear_fc2.weight": split(1, peers, **{f"{mlp}down_proj.weight": (hidden, wide)}),
        }
    if layers.stop < config.num_hidden_layers:
        return stage
    stage["decoder.final_layernorm.weight"] = kept("model.norm.weight", hidden)
    if not config.tie_word_embeddings:
        stage["output_layer.weight"] = Fused(("lm_head.weight",), ((vocab, hidden),), 0, peers)
    elif layers.start > 0:
        stage["output_layer.weight"] = Fused(embedding.pieces, embedding.shapes, 0, peers, borrowed=True)
    if scalar:
        stage |= {"scalar.weight": kept("scalar.weight", 1, hidden), "scalar.bias": kept("scalar.bias", 1)}
    return stage
