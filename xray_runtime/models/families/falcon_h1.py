"""Falcon-H1: attention and Mamba 2 side by side in each layer."""

from __future__ import annotations

from xray_runtime.models.family import Family, Logits

FAMILY = Family(model_types=("falcon_h1",), logits=lambda config: Logits(scale=config.lm_head_multiplier))
