"""SmolLM3: a Llama, some of whose layers have no rotary embedding."""

from __future__ import annotations

from xray_runtime.models.family import Family

FAMILY = Family(model_types=("smollm3",), packs=True, tried=("vllm",))
