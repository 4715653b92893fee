"""Falcon."""

from __future__ import annotations

from xray_runtime.models.family import Family

FAMILY = Family(model_types=("falcon",), tried=("vllm",))
