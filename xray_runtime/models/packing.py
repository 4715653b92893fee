"""Sequences of different lengths through a backbone in one row, each attending to itself alone: nothing is padded.

transformers tells packed sequences by their positions, but then makes a mask [N, N] of them, which costs more than the
padding it saves. Here attention runs sequence by sequence (on CUDA, in half precision, in one kernel that takes their
bounds); everything else of a layer looks at one token at a time and does not notice.

Shapes: N tokens of all sequences together, a heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ATTENTION = "xray_packed"
FAMILIES = ("llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3")
"""Model types of which tests show that tokens meet in attention alone, and there by causality alone."""
VARLEN_HEAD_SIZES = range(8, 257, 8)
"""Head sizes of torch's kernel for sequences of different lengths."""


@dataclass(frozen=True)
class Bounds:
    """Start and end of each sequence of a row."""

    lengths: list[int]
    offsets: Tensor
    """[B + 1] int32."""
    positions: Tensor
    """Position of each token in its sequence [N]."""

    @classmethod
    def of(cls, lengths: Tensor) -> Bounds:
        """The bounds of sequences of `lengths` [B]."""
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        begins = offsets[:-1].repeat_interleave(lengths)
        positions = torch.arange(len(begins), device=lengths.device) - begins
        return cls(lengths.tolist(), offsets.int(), positions)


def can_pack(lm: Any) -> bool:
    """Whether the model's attention can be ours: a known family without sliding windows."""
    config = lm.config
    windows = any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or [])
    return config.model_type in FAMILIES and not windows and getattr(config, "sliding_window", None) is None


def use_packed_attention(lm: Any) -> None:
    """Have `lm` attend as `packed_states` needs it. Called in any other way it computes what it did before."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    # A trunk that was taken from another model has a config of its own.
    for part in lm.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = ATTENTION


def packed_states(backbone: Any, lengths: Tensor, **entering: Tensor) -> Tensor:
    """Last hidden states [N, H] of a backbone, of `input_ids` [N] or `inputs_embeds` [N, H]."""
    bounds = Bounds.of(lengths)
    # A mask of four dimensions is handed on as it is, so none is made; our attention does not look at it.
    no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=lengths.device)
    row = {name: flat[None] for name, flat in entering.items()}
    out = backbone(**row, position_ids=bounds.positions[None], attention_mask=no_mask, bounds=bounds)
    states: Tensor = out.last_hidden_state[0]
    return states


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    bounds: Bounds | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The output of attention [1, N, a, d], for query [1, a, N, d], key and value (which may have fewer heads)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if bounds is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    grouped = query.shape[1] != key.shape[1]
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.is_cuda and half and query.shape[-1] in VARLEN_HEAD_SIZES:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        longest, offsets = max(bounds.lengths), bounds.offsets
        out = varlen_attn(
            q, k, v, offsets, offsets, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=grouped
        )
        assert isinstance(out, Tensor)
        return out[None], None
    sequences = zip(*(x.split(bounds.lengths, dim=2) for x in (query, key, value)), strict=True)
    parts = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped).transpose(1, 2)
        for q, k, v in sequences
    ]
    return torch.cat(parts, dim=1), None
