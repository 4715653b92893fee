"""HunYuan, dense and as a mixture of experts."""

from __future__ import annotations

from xray_runtime.models.family import Family

FAMILY = Family(model_types=("hunyuan_v1_dense", "hunyuan_v1_moe"), tried=("vllm",))
