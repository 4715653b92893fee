"""Small models with random weights, to begin from."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from xray_runtime.data.tokenizer import Tokenizer
from xray_runtime.models.config import FreshBase
from xray_runtime.models.transformers_import import import_transformers


def fresh_llama(config: FreshBase, tokenizer: Tokenizer, seed: int) -> nn.Module:
    """A Llama or, with experts, a Qwen3-MoE with random weights for `tokenizer`, the same for the same seed."""
    import_transformers()
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": "float32",
    }
    if config.num_experts:
        sizes |= {
            "moe_intermediate_size": config.intermediate_size,
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "norm_topk_prob": True,
            "head_dim": config.hidden_size // config.num_heads,
            # Its routers learn to use all experts alike.
            "output_router_logits": True,
        }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lm: nn.Module = (
            transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
            if config.num_experts
            else transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        )
        return lm
