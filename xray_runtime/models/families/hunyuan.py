"""HunYuan, dense."""

from __future__ import annotations

from xray_runtime.models.family import Family

FAMILY = Family(model_types=("hunyuan_v1_dense",), tried=("vllm",))
