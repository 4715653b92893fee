"""Qwen2 and Qwen2.5: a Llama with biases on q, k and v, which its config does not mention."""

from __future__ import annotations

from xray_runtime.models.family import Beyond, Family

FAMILY = Family(
    model_types=("qwen2",),
    packs=True,
    beyond=lambda config, sizes: Beyond(sizes.queries + 2 * sizes.keys),
    tried=("vllm",),
)
