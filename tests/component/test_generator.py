"""Real vLLM behind a WholeModel: deterministic replies, verified weights, versions that must match."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file

from xray_runtime.actors.rows import pad, take
from xray_runtime.actors.whole_model import open_models
from xray_runtime.actors.workhorse import GeneratorSpec, ModelSpec
from xray_runtime.config import RuntimeConfig
from xray_runtime.engines.vllm_generator import Sampling, StaleWeightsError
from xray_runtime.errors import root_cause
from xray_runtime.models.objectives import ReferenceObjective
from xray_runtime.weights import plasma
from xray_runtime.weights.plasma import WeightTransferError, pack, unpack, verify

RUNTIME = RuntimeConfig(threads=1, device="cpu")
SAMPLING = Sampling(max_new_tokens=6, temperature=0.7, eos_token_id=1, pad_token_id=0)
NUM_PROMPTS = 6


@pytest.fixture(scope="module")
def models(cluster: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    specs = {
        "generator": GeneratorSpec(tiny_model, 32),
        "scorer": ModelSpec(tiny_model, ReferenceObjective(SAMPLING.temperature)),
    }
    with open_models(RUNTIME, tmp_path_factory.mktemp("logs"), specs) as handles:
        yield handles


@pytest.fixture(scope="module")
def prompts() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    ids, lengths = pad((rng.integers(5, 280, size=n).tolist() for n in (4, 9, 5, 7, 3, 8)), 0)
    return {"input_ids": ids, "lengths": lengths, "seed": np.arange(100, 100 + NUM_PROMPTS)}


def generate(models: dict[str, Any], rows: dict[str, np.ndarray], version: int) -> dict[str, np.ndarray]:
    return ray.get(models["generator"].generate.remote(rows, SAMPLING, version))


def tensors(tiny_model: Path, scale: float) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor * scale) for name, tensor in sorted(load_file(tiny_model / "model.safetensors").items())]


def test_the_life_of_a_generator(models: dict[str, Any], prompts: dict[str, np.ndarray], tiny_model: Path) -> None:
    """One story, since each start of vLLM takes seconds: sample, agree, refuse, update, agree again."""
    first = generate(models, prompts, 0)
    assert (first["response_mask"].sum(1) >= 1).all()

    # A reply depends on its own seed alone, not on its neighbours.
    some = generate(models, take(prompts, [4, 1]), 0)
    np.testing.assert_array_equal(some["response_ids"], first["response_ids"][[4, 1]])
    np.testing.assert_array_equal(some["rollout_logprobs"], first["rollout_logprobs"][[4, 1]])

    # More prompts than vLLM takes in at a time.
    many = generate(models, take(prompts, [0, 1, 2, 3, 4, 5] * 250), 0)
    np.testing.assert_array_equal(many["rollout_logprobs"][-NUM_PROMPTS:], first["rollout_logprobs"])

    # Log-probabilities are those of an independent forward, at the sampling temperature.
    replies = [r[m].tolist() for r, m in zip(first["response_ids"], first["response_mask"], strict=True)]
    asked = [ids[:n].tolist() for ids, n in zip(prompts["input_ids"], prompts["lengths"], strict=True)]
    ids, lengths = pad((p + r for p, r in zip(asked, replies, strict=True)), 0)
    rows = {"input_ids": ids, "prompt_lengths": prompts["lengths"], "lengths": lengths}
    scored = ray.get(models["scorer"].score.remote(rows, SAMPLING.max_new_tokens))["ref_logprobs"]
    np.testing.assert_allclose(first["rollout_logprobs"], scored, atol=2e-5)

    # Another version than the one held is refused.
    with pytest.raises(Exception, match="asked to generate with policy version 1") as stale:
        generate(models, prompts, 1)
    assert isinstance(root_cause(stale.value), StaleWeightsError)

    # A damaged transfer is refused before anything is touched, and can be tried again.
    good = pack(tensors(tiny_model, 1.5), version=1)
    bucket = good.buckets[0]
    entries = (dataclasses.replace(bucket.entries[0], checksum="0" * 32), *bucket.entries[1:])
    bad = dataclasses.replace(good, buckets=(dataclasses.replace(bucket, entries=entries),))
    with pytest.raises(Exception, match="checksum") as corrupt:
        ray.get(models["generator"].load_weights.remote(bad))
    assert isinstance(root_cause(corrupt.value), WeightTransferError)
    np.testing.assert_array_equal(generate(models, prompts, 0)["response_ids"], first["response_ids"])

    # The whole update arrives: replies are now those of the new weights, also through the tied output layer.
    assert ray.get(models["generator"].load_weights.remote(good)) == 1
    second = generate(models, prompts, 1)
    assert (second["rollout_logprobs"] != first["rollout_logprobs"]).any()
    expected = _logprobs(tiny_model, tensors(tiny_model, 1.5), asked, second)
    np.testing.assert_allclose(second["rollout_logprobs"], expected, atol=2e-5)

    # A partial update (a frozen trunk sends nothing) leaves the rest as it was.
    norm_only = [(n, t) for n, t in tensors(tiny_model, 0.5) if n == "model.norm.weight"]
    assert ray.get(models["generator"].load_weights.remote(pack(norm_only, version=2))) == 2
    third = generate(models, prompts, 2)
    mixed = dict(tensors(tiny_model, 1.5)) | dict(norm_only)
    expected = _logprobs(tiny_model, list(mixed.items()), asked, third)
    np.testing.assert_allclose(third["rollout_logprobs"], expected, atol=2e-5)


def _logprobs(
    directory: Path, weights: list[tuple[str, torch.Tensor]], asked: list[list[int]], out: dict[str, np.ndarray]
) -> np.ndarray:
    """Log-probabilities of the replies under `weights`, by transformers in float64."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    lm.load_state_dict({name: tensor.double() for name, tensor in weights}, strict=False)
    lm.tie_weights()
    expected = np.zeros_like(out["rollout_logprobs"])
    for row, prompt in enumerate(asked):
        reply = out["response_ids"][row][out["response_mask"][row]].tolist()
        logits = lm(torch.tensor([prompt + reply])).logits[0].detach() / SAMPLING.temperature
        logp = torch.log_softmax(logits, -1)
        expected[row, : len(reply)] = [float(logp[len(prompt) - 1 + t, token]) for t, token in enumerate(reply)]
    return expected


def test_weights_survive_the_trip_in_several_buckets(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plasma, "BUCKET_BYTES", 1000)
    sent = {f"w{i}": torch.randn(i + 1, 37, dtype=dtype) for i, dtype in enumerate([torch.float32, torch.bfloat16] * 4)}
    update = pack(sent.items(), version=5)
    assert len(update.buckets) > 2
    arrived = {name: tensor for bucket in update.buckets for name, tensor in unpack(bucket)}
    assert arrived.keys() == sent.keys()
    assert all(torch.equal(arrived[name], sent[name]) and arrived[name].dtype == sent[name].dtype for name in sent)
    assert update.num_bytes == sum(t.numel() * t.element_size() for t in sent.values())


def test_one_flipped_bit_is_found_and_named(cluster: None) -> None:
    update = pack([("a", torch.randn(8)), ("b", torch.randn(8))], version=1)
    data = np.array(ray.get(update.buckets[0].ref))
    data[update.buckets[0].entries[1].offset] ^= 1
    bucket = dataclasses.replace(update.buckets[0], ref=ray.put(data))
    with pytest.raises(WeightTransferError, match="weight b: checksum"):
        verify(dataclasses.replace(update, buckets=(bucket,)))
