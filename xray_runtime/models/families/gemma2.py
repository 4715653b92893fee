"""Gemma 2 and VaultGemma: attention scores and logits are capped."""

from __future__ import annotations

from xray_runtime.models.family import Family, Logits

FAMILY = Family(
    model_types=("gemma2", "vaultgemma"),
    logits=lambda config: Logits(cap=config.final_logit_softcapping),
    attention=lambda config: "sdpa" if config.attn_logit_softcapping is None else "eager",
)
