"""Granite: embeddings, residuals, attention and logits have multipliers."""

from __future__ import annotations

from xray_runtime.models.families._mixture import BALANCE
from xray_runtime.models.family import Family, Logits

FAMILY = Family(
    model_types=("granite", "granitemoe"),
    logits=lambda config: Logits(divisor=config.logits_scaling),
    auxiliary=BALANCE,
    tried=("vllm",),
)
