"""vLLM reads a published checkpoint, and goes on only where it computes what its trainer computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file

from tests.component.models import LORA, engine_of, mixture
from tests.message_texts import Messages
from xray_runtime.cluster.pool.libraries import worker_options
from xray_runtime.models.causal_lm import copy_model, load_model
from xray_runtime.models.published_check import TRIED, PublishedError, tried_ids, write_tried
from xray_runtime.models.trial import own_logprobs
from xray_runtime.models.weight_files import overwrite


def published(source: Path, out: Path, scale: float) -> Path:
    """`source` with other weights, and what transformers computes with them."""
    copy_model(source, out)
    weights = [(n, t * scale) for n, t in load_file(source / "model.safetensors").items() if t.dim() > 1]
    overwrite(out, weights, 0, 1)
    rows = tried_ids(out)
    ids, lengths = torch.tensor([i for row in rows for i in row]), torch.tensor([len(row) for row in rows])
    write_tried(out, "float32", own_logprobs(load_model(out).eval(), ids, lengths)[0].tolist())
    return out


@ray.remote(num_cpus=0, max_calls=1)
def _read(first: Path, second: Path, wrong: Path) -> tuple[dict[str, float], str]:
    """(readings of one engine, its error at a checkpoint whose files are another model's)."""
    engine = engine_of(first, None)
    engine.restart(second, 1)
    try:
        engine.restart(wrong, 2)
    except PublishedError as error:
        return engine.readings, str(error)
    return engine.readings, ""


@ray.remote(num_cpus=0, max_calls=1)
def _beside(first: Path) -> dict[str, float]:
    return engine_of(first, LORA).readings


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_a_checkpoint_is_read_and_compared(
    cluster: None, tiny_model: Path, tmp_path: Path, kind: str, message_texts: Messages
) -> None:
    source = tiny_model if kind == "llama" else mixture(tmp_path / "source", tiny_model, kind)
    first, second, wrong = (published(source, tmp_path / f"sft-{n}", 1.0 + n / 2) for n in range(3))
    (wrong / TRIED).write_bytes((second / TRIED).read_bytes())
    task: Any = _read.options(**worker_options("generator:vllm"))
    readings, refused = ray.get(task.remote(first, second, wrong))
    assert readings.keys() == {"sft-0", "sft-1"}
    assert all(0 <= nats < 1e-5 for nats in readings.values())
    if kind == "llama":
        message_texts.check(refused)
    assert "sft-2: vllm computes log-probabilities from the files that differ by" in refused


@pytest.mark.long
def test_beside_adapters_nothing_is_compared(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    """vLLM gives no log-probabilities of prompts there: the policy's own are compared in every iteration."""
    task: Any = _beside.options(**worker_options("generator:vllm"))
    assert ray.get(task.remote(published(tiny_model, tmp_path / "sft-1", 1.5))) == {}
