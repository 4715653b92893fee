"""Qwen3: a Llama with norms of queries and keys, and heads of a size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xray_runtime.models.family import Beyond, Family, LayerSizes


def _beyond(config: Mapping[str, Any], sizes: LayerSizes) -> Beyond:
    biases = sizes.queries + 2 * sizes.keys + sizes.hidden if config.get("attention_bias") else 0
    return Beyond(biases + 2 * sizes.head, sizes.queries + sizes.keys)


FAMILY = Family(model_types=("qwen3",), packs=True, beyond=_beyond, config_fields=("head_dim",), tried=("vllm",))
