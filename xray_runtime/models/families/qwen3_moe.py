"""Qwen3-MoE: Qwen3 with a mixture of experts."""

from __future__ import annotations

from xray_runtime.models.families._mixture import BALANCE, SOFTMAX
from xray_runtime.models.family import Family

FAMILY = Family(
    model_types=("qwen3_moe",), packs=True, routers=("gate",), auxiliary=BALANCE, routing=SOFTMAX, tried=("vllm",)
)
