"""A generator that computes the policy's adapter beside the frozen weights: the same policy, whole or not at all."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file

from tests.component.models import LORA, engine_of, learned
from tests.message_texts import Messages
from xray_runtime.cluster.pool.libraries import worker_options
from xray_runtime.data.batch import ReplyBatch
from xray_runtime.engines.generation import Generation
from xray_runtime.engines.sampling import Sampling
from xray_runtime.engines.sync.object_store import WeightUpdate, pack
from xray_runtime.engines.sync.shared_memory import SharedWriter
from xray_runtime.kernel.graph.artifacts import ADAPTER
from xray_runtime.models.adapter_files import write_adapter
from xray_runtime.models.adapters import Adapters
from xray_runtime.models.causal_lm import copy_model
from xray_runtime.models.weight_files import overwrite

SAMPLING = Sampling(max_new_tokens=6, temperature=0.7, stop_token_ids=(1,), pad_token_id=0)
PROMPTS, SEEDS = [[5, 9, 12, 40, 41, 42, 43, 44], [7, 8], [30, 31, 32, 33]] * 4, list(range(12))


def tensors(adapters: Adapters) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in adapters.unmerged(lambda name, parameter: parameter.data)}


def replies(engine: Generation, version: int) -> ReplyBatch:
    return engine.generate(PROMPTS, SEEDS, SAMPLING, version)


@ray.remote(num_cpus=0, max_calls=1)
def _merged(directory: Path, base: Path, library: str) -> list[ReplyBatch]:
    engine = engine_of(base, None, library)
    first = replies(engine, 0)
    engine.restart(directory, 1)
    return [first, replies(engine, 1)]


@ray.remote(num_cpus=0, max_calls=1)
def _beside(base: Path, place: Path, library: str) -> dict[str, Any]:
    engine, memory = engine_of(base, LORA, library), SharedWriter()

    def update(version: int, **changed: torch.Tensor) -> WeightUpdate:
        return pack((tensors(learned(base, LORA, version)) | changed).items(), version, memory)

    found: dict[str, Any] = {"base": replies(engine, 0)}
    one = update(1)
    start = time.perf_counter()
    engine.weights.load(one)
    found |= {"seconds": time.perf_counter() - start, "bytes": one.num_bytes, "one": replies(engine, 1)}
    # An adapter for layers that the model lacks must not be taken for the base: the one before stays.
    strange = {f"base_model.model.model.layers.9.self_attn.q_proj.lora_{s}.weight": torch.ones(3, 3) for s in "AB"}
    for name, bad in (("unbound", update(2, **strange)), ("damaged", update(2))):
        if name == "damaged":
            memory._files[-1].array[:64] = 7
        try:
            engine.weights.load(bad)
        except Exception as error:
            found[name] = str(error)
        found[f"after {name}"] = replies(engine, 1)
    engine.weights.load(update(4))
    found["four"] = replies(engine, 4)
    write_adapter(place / "trained" / ADAPTER, LORA, tensors(learned(base, LORA, 1)))
    engine.restart(place / "trained", 5)
    found["published"] = replies(engine, 5)
    engine.restart(base)
    found["again"] = replies(engine, 0)
    return found


def same(one: ReplyBatch, other: ReplyBatch, limit: float = 0.0) -> bool:
    if not np.array_equal(one.response_ids.values, other.response_ids.values):
        return False
    return bool(np.abs(one.rollout_logprobs.values - other.rollout_logprobs.values).max() <= limit)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("library", ["vllm", "transformers"])
def test_an_adapter_beside_the_weights_is_the_merged_policy(
    tiny_model: Path, tmp_path: Path, message_texts: Messages, library: str
) -> None:
    copy_model(tiny_model, tmp_path / "merged")
    overwrite(tmp_path / "merged", learned(tiny_model, LORA, 1).merged(lambda name, parameter: parameter.data), 0, 1)
    options = worker_options(f"generator:{library}")
    (base, merged), found = ray.get(
        [
            _merged.options(**options).remote(tmp_path / "merged", tiny_model, library),
            _beside.options(**options).remote(tiny_model, tmp_path, library),
        ]
    )
    assert same(found["base"], base, 2e-5)
    assert same(found["one"], merged, 2e-5)
    assert not same(merged, base, 1e-2)
    for after in ("after unbound", "after damaged"):
        assert same(found[after], found["one"]), after
    assert not same(found["four"], found["one"], 1e-3)
    assert same(found["published"], found["one"])
    assert same(found["again"], found["base"])
    message_texts.check(found["unbound"])
    message_texts.check(found["damaged"])
    # Rank 3 of a hidden size of 64: what is sent is smaller than the matrices that it changes.
    size = sum(t.nbytes for n, t in load_file(tiny_model / "model.safetensors").items() if "q_proj" in n or "mlp" in n)
    assert found["bytes"] < size / 2
