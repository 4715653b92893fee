"""Granite: embeddings, residuals, attention and logits have multipliers."""

from __future__ import annotations

from xray_runtime.models.family import Family

FAMILY = Family(model_types=("granite", "granitemoe"), tried=("vllm",))
