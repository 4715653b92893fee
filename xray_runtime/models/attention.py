"""The class and the implementation of attention with which transformers computes a model."""

from __future__ import annotations

from typing import Any

import transformers

from xray_runtime.models.family import HFConfig, family_of


def attention_of(config: HFConfig) -> str:
    """transformers' attention for a causal LM of this Hugging Face config: its family's, or "eager" without another."""
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return family_of(config.model_type).attention(config) if getattr(known, "_supports_sdpa", True) else "eager"


def auto_class(config: HFConfig) -> Any:
    """transformers' Auto class of a causal LM of this Hugging Face config, which may also read pictures."""
    reads_pictures = family_of(config.model_type).pictures is not None
    return transformers.AutoModelForImageTextToText if reads_pictures else transformers.AutoModelForCausalLM
