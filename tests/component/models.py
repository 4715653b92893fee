"""WholeModels for tests: opened as a stage opens them, and looked into."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
import transformers

from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.opening import WORKHORSES, model_opener
from xray_runtime.cluster.types import RankInfo
from xray_runtime.cluster.whole_model import WholeModel
from xray_runtime.cluster.workhorse import Workhorse
from xray_runtime.data.batch import ReplyBatch, TextBatch
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.models.adapters import Adapters
from xray_runtime.models.causal_lm import load_model, load_tokenizer, save_model
from xray_runtime.models.lora import LoRAConfig

RUN_ID = "tests"
SECONDS = 120


def open_models(
    runtime: RuntimeConfig, log_dir: Path, specs: Mapping[str, ModelSpec | GeneratorSpec], run_id: str = RUN_ID
) -> AbstractContextManager[dict[str, Any]]:
    """What a stage of the run `run_id` with this log directory would open."""
    return model_opener(runtime, log_dir, run_id)(specs)


class Empty(Workhorse):
    """A process that holds no model and does not even import torch, for tests of processes alone."""

    def build(self, spec: ModelSpec, rank_info: RankInfo) -> None: ...


class Other(Empty):
    """Another kind of process."""


@dataclass(frozen=True)
class EmptySpec(ModelSpec):
    objective: Any = None


WORKHORSES[EmptySpec] = Empty


@ray.remote(num_cpus=0)
class Holder:
    """Holds leases and tickets, as a WholeModel does; its owner's death is its own."""

    def ping(self) -> None: ...

    def work(self, seconds: float) -> None:
        time.sleep(seconds)


def pids(model: Any) -> list[int]:
    """Process ids of a model's Workhorses, in order of rank."""

    def ask(self: WholeModel) -> list[int]:
        return ray.get([w.__ray_call__.remote(lambda _: os.getpid()) for w in self._workhorses])

    found: list[int] = ray.get(model.__ray_call__.remote(ask), timeout=SECONDS)
    return found


def pid_of(actor: Any) -> int:
    """Process id of an actor."""
    found: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=SECONDS)
    return found


def gone(pid: int) -> bool:
    """Whether a process ends in time."""
    deadline = time.monotonic() + SECONDS
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not psutil.pid_exists(pid)


def learned(model: Path, lora: LoRAConfig, seed: int) -> Adapters:
    """Adapters of `model` that have learned something."""
    adapters, random = Adapters(load_model(model), lora, model, seed=3), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapters.layers.values():
            layer.lora_B.weight.normal_(std=0.1, generator=random)
    return adapters


RUNTIME = RuntimeConfig(threads=1, device="cpu")


VOCABULARY = 280


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
