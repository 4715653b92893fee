"""Mixtral: Mistral with a mixture of experts in each layer."""

from __future__ import annotations

from xray_runtime.models.families._mixture import BALANCE
from xray_runtime.models.family import Family

FAMILY = Family(model_types=("mixtral",), packs=True, routers=("gate",), auxiliary=BALANCE, tried=("vllm",))
