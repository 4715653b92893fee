"""Sizes of common models on the Hugging Face hub, so that they are planned without a network."""

from __future__ import annotations

from typing import Any

_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)
_ROWS: dict[str, tuple[Any, ...]] = {
    "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, 64, 151_936, True),
    "Qwen/Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151_936, True),
    "meta-llama/Llama-3.2-1B": ("llama", 2048, 8192, 16, 32, 8, 64, 128_256, True),
    "Qwen/Qwen3-1.7B": ("qwen3", 2048, 6144, 28, 16, 8, 128, 151_936, True),
    "meta-llama/Llama-3.2-3B": ("llama", 3072, 8192, 28, 24, 8, 128, 128_256, True),
    "Qwen/Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151_936, True),
    "meta-llama/Llama-3.1-8B": ("llama", 4096, 14_336, 32, 32, 8, 128, 128_256, False),
    "Qwen/Qwen3-8B": ("qwen3", 4096, 12_288, 36, 32, 8, 128, 151_936, False),
    "Qwen/Qwen3-14B": ("qwen3", 5120, 17_408, 40, 40, 8, 128, 151_936, False),
    "Qwen/Qwen3-32B": ("qwen3", 5120, 25_600, 64, 64, 8, 128, 151_936, False),
    "meta-llama/Llama-3.1-70B": ("llama", 8192, 28_672, 80, 64, 8, 128, 128_256, False),
}
KNOWN_CONFIGS: dict[str, dict[str, Any]] = {name: dict(zip(_FIELDS, row, strict=True)) for name, row in _ROWS.items()}
"""Hub name → the fields of its `config.json` that a plan needs."""
