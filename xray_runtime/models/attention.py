"""The implementation of attention with which transformers computes a model."""

from __future__ import annotations

import transformers

from xray_runtime.models.family import HFConfig, family_of


def attention_of(config: HFConfig) -> str:
    """transformers' attention for a causal LM of this Hugging Face config: its family's, or "eager" without another."""
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return family_of(config.model_type).attention(config) if getattr(known, "_supports_sdpa", True) else "eager"
