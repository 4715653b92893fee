"""Configs of tiny random models, one a family: two layers (four where kinds of layers take turns), a few thousand
parameters each, heads of 32, which vLLM's kernels for CPU accept."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "initializer_range": 0.15,
}
"""Weights larger than a new model's, so that attention, caps and routers matter."""
OMIT: Any = object()
"""A field that a family does not take."""
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
GROUPED = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0},
}
LATENT = {
    **{"kv_lora_rank": 512, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32},
    "head_dim": 64,  # of what is rotated
}
"""512 + 64 features are cached, the only number that vLLM's kernel for CPU has."""
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2}
DELTA = {
    **{"num_hidden_layers": 4, "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2},
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
RECIPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mistral, windows": {"sliding_window": 8},
    "mixtral": EXPERTS,
    "qwen2": {},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen3_next": EXPERTS | DELTA | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": DELTA,
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 8},
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window": 8},
    "gemma3n_text": {
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 320, "sliding_window": 8},
        **{"hidden_size_per_layer_input": 32, "intermediate_size": [96] * 4, "laurel_rank": 8},
        **{"activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0], "altup_num_inputs": 2},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {"sliding_window": 8, "hidden_size_per_layer_input": 0, "global_head_dim": 32},
    "phi": {},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    "olmo2": {},
    "olmo3": {"sliding_window": 8},
    "olmoe": EXPERTS,
    "smollm3": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": GROUPED,
    "glm4_moe_lite": GROUPED | LATENT,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128},
    "gpt_neox": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "falcon": {"head_dim": OMIT, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128},
    "starcoder2": {},
    "stablelm": {},
    "nemotron": {},
    "nemotron_h": {
        **{"mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1, "ssm_state_size": 16, "expand": 2},
        **{"num_hidden_layers": 4, "hybrid_override_pattern": "M-M*", "layers_block_type": None},
    },
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": EXPERTS | {"moe_topk": [2, 2], "num_experts_per_tok": 2, "moe_intermediate_size": 96},
    "seed_oss": {},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
    "exaone4": {"sliding_window": 8, "sliding_window_pattern": 2},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "granitemoe": EXPERTS | {"logits_scaling": 4.0},
    "granitemoehybrid": EXPERTS | MAMBA | {"shared_intermediate_size": 64, "layer_types": ["mamba", "attention"]},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 8},
    "deepseek_v2": GROUPED | LATENT | {"topk_method": "greedy"},
    "deepseek_v3": GROUPED | LATENT | {"topk_method": "noaux_tc"},
    "gpt_oss": EXPERTS | {"sliding_window": 8},
    "llama4_text": EXPERTS | {"num_experts_per_tok": 1, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 1},
    "mamba": {"state_size": 16, "intermediate_size": OMIT},
    "mamba2": {"state_size": 16, "intermediate_size": OMIT, "num_heads": 4, "head_dim": 32, "n_groups": 1, "expand": 2},
    "bloom": {"n_layer": 2, "n_head": 2},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128, "rotary_dim": 16},
    "minicpm3": LATENT | {"dim_model_base": 32},
    "apertus": {},
    "nanochat": {},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    "recurrent_gemma": {"lru_width": 64, "block_types": ["recurrent", "attention"]},
    "vaultgemma": {"query_pre_attn_scalar": 32, "sliding_window": 8},
}
"""Row of the table → what its config has beyond or other than `SIZES`. A name goes on after a comma where several rows
are of one `model_type`."""


def is_mixture(row: str) -> bool:
    """Whether a row's model has experts."""
    return any("experts" in field for field in RECIPES[row])


def model_type(row: str) -> str:
    """transformers' name of a row's family."""
    return row.partition(",")[0]
