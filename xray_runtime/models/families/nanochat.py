"""nanochat."""

from __future__ import annotations

from xray_runtime.models.family import Family, Logits

FAMILY = Family(model_types=("nanochat",), logits=lambda config: Logits(cap=config.final_logit_softcapping))
