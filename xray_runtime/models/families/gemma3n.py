"""The text model of Gemma 3n."""

from __future__ import annotations

from xray_runtime.models.family import Family, Logits

FAMILY = Family(model_types=("gemma3n_text",), logits=lambda config: Logits(cap=config.final_logit_softcapping))
