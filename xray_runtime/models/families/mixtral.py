"""Mixtral: Mistral with a mixture of experts in each layer."""

from __future__ import annotations

from xray_runtime.models.families._mixture import BALANCE, SOFTMAX
from xray_runtime.models.family import Family

FAMILY = Family(
    model_types=("mixtral",), packs=True, routers=("gate",), auxiliary=BALANCE, routing=SOFTMAX, tried=("vllm",)
)
