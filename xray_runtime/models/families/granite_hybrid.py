"""Granite 4: layers of Mamba 2 and of attention, some with experts."""

from __future__ import annotations

from xray_runtime.models.family import Family, Logits

FAMILY = Family(model_types=("granitemoehybrid",), logits=lambda config: Logits(divisor=config.logits_scaling))
