"""The model, the batch and the device of all steps, and learners opened without Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import xxhash

from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.types import RankInfo
from xray_runtime.cluster.workhorse import reserve_port
from xray_runtime.data.batch import TextBatch
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.methods.sft.config import SFTConfig
from xray_runtime.models.causal_lm import save_model
from xray_runtime.models.lora import LoRAConfig
from xray_runtime.models.objectives import Objective, SFTObjective

SEED = 0
GROUP = 2
"""Replies to a prompt in `Setting.grouped_rows`."""


class StepFailed(RuntimeError):
    """A figure of a step is outside its limit."""


def check(holds: bool, text: str) -> None:
    """Raise StepFailed with `text` unless it `holds`."""
    if not holds:
        raise StepFailed(text)


@dataclass(frozen=True)
class ModelSize:
    """The scale of the model and of the batch."""

    config: dict[str, int]
    """Fields of a Llama's config."""
    num_rows: int
    prompt_tokens: tuple[int, int]
    """Shortest prompt and, not included, longest."""
    reply_tokens: tuple[int, int]
    micro_batch_tokens: int


FULL = ModelSize(
    # The shape of Llama 3.2 1B: 1.24 billion parameters, four heads to a key-value head.
    config={
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    num_rows=32,
    prompt_tokens=(128, 257),
    reply_tokens=(256, 513),
    micro_batch_tokens=8192,
)
# A vocabulary of Qwen2.5 7B's: its embedding is 1.09 GB in bfloat16, above a gibibyte; little else.
WIDE = replace(
    FULL,
    config={
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 4096,
        "num_hidden_layers": 2,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
)
TINY = ModelSize(
    config={
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    num_rows=6,
    prompt_tokens=(3, 9),
    reply_tokens=(4, 9),
    micro_batch_tokens=48,
)


@dataclass(frozen=True)
class Setting:
    """Where the steps of one acceptance run.

    Args:
        folder: of the model and of everything that steps write.
        rehearse: take the tiny model, on a GPU or on the CPU.
        wide: take the model with a large embedding.
    """

    folder: Path
    rehearse: bool
    wide: bool = False

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def size(self) -> ModelSize:
        return TINY if self.rehearse else WIDE if self.wide else FULL

    @property
    def model(self) -> Path:
        """Directory of the model in Hugging Face form."""
        return self.folder / ("wide" if self.wide else "model")

    @property
    def half(self) -> torch.dtype:
        """The generator's precision here, as `VLLMSampler` chooses it."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def make_model(self) -> None:
        """Write the model, with random float32 weights; nothing is downloaded."""
        tokenizer = train_tokenizer(["hello there", "how are you today", "fine thanks"] * 20, 320)
        # Weights of five times the usual width: attention and MLP count beside the residual.
        config = transformers.LlamaConfig(
            **self.size.config,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            initializer_range=0.1 if self.rehearse else 0.04,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
        torch.manual_seed(SEED)
        with torch.device(self.device):
            lm = transformers.LlamaForCausalLM(config)
        save_model(lm.cpu(), tokenizer, self.model)

    @cached_property
    def grouped_rows(self) -> TextBatch:
        """The same number of rows, of which each prompt begins several, as in a rollout of GRPO."""
        rows, per_prompt = self.rows, GROUP
        replies = [ids[start:] for ids, start in zip(rows.input_ids, rows.prompt_lengths, strict=True)]
        starts = list(rows.input_ids.heads(rows.prompt_lengths))
        return TextBatch.of([starts[row - row % per_prompt] for row in range(len(replies))], replies)

    @cached_property
    def rows(self) -> TextBatch:
        """Prompts and replies of random tokens."""
        rng, size = np.random.default_rng(SEED), self.size

        def texts(between: tuple[int, int]) -> list[np.ndarray]:
            lengths = rng.integers(*between, size=size.num_rows)
            return [rng.integers(5, size.config["vocab_size"], length) for length in lengths]

        return TextBatch.of(texts(size.prompt_tokens), texts(size.reply_tokens))

    def runtime(self, **fields: Any) -> RuntimeConfig:
        return RuntimeConfig(device=self.device, threads=2, **fields)  # type: ignore[arg-type]

    def spec(self, lora: LoRAConfig | None = None, objective: Objective | None = None, **engine: Any) -> ModelSpec:
        """The model for SFT, or another `objective`, with these fields of its engine (default: float32)."""
        fields: dict[str, Any] = {"precision": "float32", "micro_batch_tokens": self.size.micro_batch_tokens}
        config = SFTConfig(weight_decay=0.0, lora=lora, engine=EngineConfig(**fields | engine))
        return ModelSpec(self.model, objective or SFTObjective(), training=config)

    @contextlib.contextmanager
    def learner(self, spec: ModelSpec, **runtime: Any) -> Iterator[Learner]:
        """The model of `spec` on this process's device, as its only rank."""
        learner, reserved = Learner(self.runtime(**runtime)), reserve_port()
        learner.build(spec, RankInfo("policy", 0, 0, 1, "127.0.0.1", reserved.getsockname()[1], None))
        try:
            yield learner
        finally:
            learner.unload()
            reserved.close()


def weights_digest(learner: Learner) -> str:
    """Digest of the names and bits of all trained weights."""
    digest = xxhash.xxh3_128()
    assert learner.engine is not None
    for name, tensor in learner.engine.weights():
        digest.update(name.encode())
        bits: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        digest.update(bits)
    return digest.hexdigest()


def free_bytes() -> int:
    """Free memory of the GPU, whichever process holds the rest."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])
