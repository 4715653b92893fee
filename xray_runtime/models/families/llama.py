"""Llama: RMSNorm, grouped-query attention, SwiGLU (Touvron et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xray_runtime.models.family import Beyond, Family, LayerSizes


def _beyond(config: Mapping[str, Any], sizes: LayerSizes) -> Beyond:
    attention = sizes.queries + 2 * sizes.keys + sizes.hidden if config.get("attention_bias") else 0
    return Beyond(attention + (2 * sizes.intermediate + sizes.hidden if config.get("mlp_bias") else 0))


FAMILY = Family(
    model_types=("llama",),
    packs=True,
    beyond=_beyond,
    megatron=lambda config: not config.attention_bias and not config.mlp_bias,
    plain_tokenizer=True,
    tried=("vllm",),
)
