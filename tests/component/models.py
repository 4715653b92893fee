"""Models for tests, and what goes into them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

from xray_runtime.data.batch import ReplyBatch, TextBatch
from xray_runtime.engines.generation import Generation
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sampling import EngineRank
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.models.adapters import Adapters
from xray_runtime.models.causal_lm import load_model, load_tokenizer, save_model
from xray_runtime.models.lora import LoRAConfig


def learned(model: Path, lora: LoRAConfig, seed: int) -> Adapters:
    """Adapters of `model` that have learned something."""
    adapters, random = Adapters(load_model(model), lora, model, seed=3), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapters.layers.values():
            layer.lora_B.weight.normal_(std=0.1, generator=random)
    return adapters


RUNTIME = RuntimeConfig(threads=1, device="cpu")
VOCABULARY = 280
LORA = LoRAConfig(rank=3, alpha=6.0, rslora=True, target_modules=["q_proj", "o_proj", "gate_proj", "up_proj"])


def engine_of(directory: Path, lora: LoRAConfig | None, engine: str = "vllm") -> Generation:
    runtime = RuntimeConfig(threads=1, device="cpu", generator_memory_gib=0.25)
    return Generation(directory, 32, GeneratorConfig(engine=engine), runtime, EngineRank("cpu"), lora)


def text(num_rows: int = 9, seed: int = 0) -> TextBatch:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(5, VOCABULARY, size=rng.integers(3, 9)).tolist() for _ in range(num_rows)]
    replies = [rng.integers(5, VOCABULARY, size=rng.integers(2, 8)).tolist() for _ in range(num_rows)]
    return TextBatch.of(prompts, replies)


def same(found: ReplyBatch, expected: ReplyBatch) -> None:
    """Replies are equal, to the bit."""
    for ours, theirs in (
        (found.response_ids, expected.response_ids),
        (found.rollout_logprobs, expected.rollout_logprobs),
    ):
        np.testing.assert_array_equal(ours.offsets, theirs.offsets)
        np.testing.assert_array_equal(ours.values, theirs.values)
    np.testing.assert_array_equal(found.ended, expected.ended)


def mixture(directory: Path, tiny_model: Path, kind: str) -> Path:
    """A small random mixture of four experts."""
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=320, hidden_size=64, intermediate_size=96, moe_intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=4, num_local_experts=4,
        num_experts_per_tok=2, max_position_embeddings=64, tie_word_embeddings=False, sliding_window=None,
    )  # fmt: skip
    torch.manual_seed(5)
    save_model(transformers.AutoModelForCausalLM.from_config(config), load_tokenizer(tiny_model), directory)
    return directory
