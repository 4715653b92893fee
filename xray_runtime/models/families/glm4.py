"""GLM-4."""

from __future__ import annotations

from xray_runtime.models.family import Family

FAMILY = Family(model_types=("glm4", "glm4_moe"), tried=("vllm",))
