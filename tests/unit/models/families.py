"""Small random models of every family, in float64."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from xray_runtime.models.attention import attention_of
from xray_runtime.models.family import FAMILIES

PACKED = [kind for name in FAMILIES for kind in FAMILIES.get(name).model_types if FAMILIES.get(name).packs]
MIXTURES = [kind for name in FAMILIES for kind in FAMILIES.get(name).model_types if FAMILIES.get(name).routers]
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SIZES = {"vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}


def model(family: str, **options: Any) -> Any:
    """Four heads, two of keys and values; weights so large that attention matters."""
    options = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "sliding_window": None} | options
    options = (EXPERTS if family in MIXTURES else {}) | options
    config = transformers.AutoConfig.for_model(family, **(SIZES | options))
    torch.manual_seed(0)
    lm = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config)).double().eval()
    if family in MIXTURES:
        lm.set_experts_implementation("eager")  # the others have no float64
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter *= 5.0 if parameter.dim() > 1 else 1.0
    return lm
