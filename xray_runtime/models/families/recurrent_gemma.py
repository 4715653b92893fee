"""RecurrentGemma: recurrent layers between those with local attention."""

from __future__ import annotations

from xray_runtime.models.family import Family, Logits

FAMILY = Family(model_types=("recurrent_gemma",), logits=lambda config: Logits(cap=config.logits_soft_cap))
