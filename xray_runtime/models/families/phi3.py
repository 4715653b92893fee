"""Phi-3."""

from __future__ import annotations

from xray_runtime.models.family import Family

FAMILY = Family(model_types=("phi3",), tried=("vllm",))
