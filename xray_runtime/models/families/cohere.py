"""Cohere (Command R) and its second generation: attention and MLP side by side, and logits times a scale."""

from __future__ import annotations

from xray_runtime.models.family import Family, Logits

FAMILY = Family(model_types=("cohere", "cohere2"), logits=lambda config: Logits(scale=config.logit_scale))
