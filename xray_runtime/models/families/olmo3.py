"""OLMo 3: OLMo 2 with sliding windows."""

from __future__ import annotations

from xray_runtime.models.family import Family

FAMILY = Family(model_types=("olmo3",), tried=("vllm",))
