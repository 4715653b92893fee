"""GPT-NeoX and Pythia."""

from __future__ import annotations

from xray_runtime.models.family import Family

FAMILY = Family(model_types=("gpt_neox",), tried=("vllm",))
