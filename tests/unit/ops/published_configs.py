"""Published models: what their `config.json` says, as short as published (families fill in the rest), and their
size."""

from __future__ import annotations

from typing import Any

NAMES = {
    "inner": "intermediate_size",
    "kv": "num_key_value_heads",
    "context": "max_position_embeddings",
    "tied": "tie_word_embeddings",
}


def published(
    parameters: int, family: str, vocabulary: int, hidden: int, layers: int, heads: int, **more: Any
) -> tuple[int, dict[str, Any]]:
    """(parameters on the model card, fields of the config)."""
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return parameters, {"model_type": family, **sizes} | {NAMES.get(name, name): value for name, value in more.items()}


PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "HuggingFaceTB/SmolLM2-1.7B": published(
        1_711_376_384, "llama", 49152, 2048, 24, 32, inner=8192, kv=32, context=8192, tied=True
    ),
    "mistralai/Mistral-7B-v0.1": published(
        7_241_732_096, "mistral", 32000, 4096, 32, 32, inner=14336, kv=8, context=32768
    ),
    "Qwen/Qwen2.5-1.5B": published(
        1_543_714_304, "qwen2", 151936, 1536, 28, 12, inner=8960, kv=2, context=131072, tied=True
    ),
    "google/gemma-2b": published(
        2_506_172_416, "gemma", 256000, 2048, 18, 8, inner=16384, kv=1, head_dim=256, context=8192
    ),
    "google/gemma-2-2b": published(
        2_614_341_888, "gemma2", 256000, 2304, 26, 8, inner=9216, kv=4, head_dim=256, context=8192
    ),
    "google/gemma-3-1b-it": published(
        999_885_952, "gemma3_text", 262144, 1152, 26, 4, inner=6912, kv=1, head_dim=256, context=32768
    ),
    "microsoft/phi-2": published(2_779_683_840, "phi", 51200, 2560, 32, 32, inner=10240, context=2048, tied=False),
    "microsoft/Phi-3-mini-4k-instruct": published(
        3_821_079_552, "phi3", 32064, 3072, 32, 32, inner=8192, kv=32, context=4096, pad_token_id=32000
    ),
    "bigcode/starcoder2-3b": published(
        3_030_371_328, "starcoder2", 49152, 3072, 30, 24, inner=12288, kv=2, context=16384
    ),
    "LiquidAI/LFM2-1.2B": published(
        1_170_340_608,
        "lfm2",
        65536,
        2048,
        16,
        32,
        kv=8,
        block_ff_dim=12288,
        full_attn_idxs=[2, 5, 8, 10, 12, 14],
        context=128000,
    ),
    # Its file holds the output layer once more, which transformers ties.
    "tiiuae/falcon-7b": published(6_921_720_704, "falcon", 65024, 4544, 32, 71, multi_query=True, parallel_attn=True),
    "EleutherAI/pythia-1.4b": published(
        1_414_647_808, "gpt_neox", 50304, 2048, 24, 16, inner=8192, context=2048, tied=False
    ),
    "stabilityai/stablelm-2-1_6b": published(
        1_644_515_328, "stablelm", 100352, 2048, 24, 32, inner=5632, kv=32, use_qkv_bias=True, context=4096
    ),
    "HuggingFaceTB/SmolLM3-3B": published(
        3_075_098_624, "smollm3", 128256, 2048, 36, 16, inner=11008, kv=4, context=65536
    ),
    "allenai/OLMo-2-1124-7B": published(
        7_298_617_344, "olmo2", 100352, 4096, 32, 32, inner=11008, context=4096, tied=False
    ),
    "baidu/ERNIE-4.5-0.3B-PT": published(
        360_748_032, "ernie4_5", 103424, 1024, 18, 16, inner=3072, kv=2, head_dim=128, context=131072, tied=True
    ),
    "zai-org/GLM-4-9B-0414": published(
        9_400_279_040, "glm4", 151552, 4096, 40, 32, inner=13696, kv=2, head_dim=128, context=32768, tied=False
    ),
    "openai-community/gpt2": (
        124_439_808,
        {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
    ),
    "facebook/opt-125m": published(125_239_296, "opt", 50272, 768, 12, 12, ffn_dim=3072, context=2048),
}
"""By name on the hub."""
