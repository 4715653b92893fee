"""ERNIE 4.5, dense."""

from __future__ import annotations

from xray_runtime.models.family import Family

FAMILY = Family(model_types=("ernie4_5",), tried=("vllm",))
