"""OLMo 2: norms after attention and MLP, and of all queries and keys together."""

from __future__ import annotations

from xray_runtime.models.family import Family

FAMILY = Family(model_types=("olmo2",), packs=True, tried=("vllm",))
