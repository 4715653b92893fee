"""Gemma, and the text models of Gemma 3 and 4."""

from __future__ import annotations

from xray_runtime.models.family import Family

FAMILY = Family(model_types=("gemma", "gemma3_text", "gemma4_text"), chosen="top_k_experts", tried=("vllm",))
