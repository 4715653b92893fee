"""Every engine behind a WholeModel: deterministic replies, verified weights, versions that must match."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file

from tests.component.layouts import short_of
from tests.component.models import mixture, same
from tests.component.processes import open_models
from tests.message_texts import Messages
from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.data.batch import PolicyBatch, PromptBatch, ReplyBatch, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.generation import Generation
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sampling import EngineRank, Sampling
from xray_runtime.engines.sync.object_store import WeightTransferError, pack
from xray_runtime.engines.sync.versioned import StaleWeightsError
from xray_runtime.engines.trainers.deepspeed.config import DeepSpeedConfig
from xray_runtime.engines.trainers.fsdp2.config import FSDP2Config
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.errors import NonFiniteError, root_cause
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.models.objectives import ReferenceObjective

ENGINES = {
    "vllm": (GeneratorConfig(), 1),
    "vllm split in two": (GeneratorConfig(tensor_parallel=2), 1),
    "transformers, two replicas": (GeneratorConfig(engine="transformers"), 2),
    "deepspeed split in two": (GeneratorConfig(engine="deepspeed", tensor_parallel=2), 1),
}
"""Name → config, replicas."""
RUNTIME = RuntimeConfig(threads=1, device="cpu")
SAMPLING = Sampling(max_new_tokens=6, temperature=0.7, stop_token_ids=(1,), pad_token_id=0)
POLICY = PPOStageConfig(temperature=SAMPLING.temperature, engine=DeepSpeedConfig(zero_stage=3, num_workhorses=2))
"""Each Workhorse holds a part of each parameter."""
NUM_PROMPTS = 6


@pytest.fixture(scope="module")
def trained(cluster: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A policy and what scores, for all engines."""
    specs: dict[str, Any] = {
        "scorer": ModelSpec(tiny_model, ReferenceObjective(SAMPLING.temperature)),
        "policy": ModelSpec(tiny_model, PPOObjective(POLICY), training=POLICY, new_head=True),
    }
    with open_models(RUNTIME, tmp_path_factory.mktemp("logs"), specs) as handles:
        yield handles


@pytest.fixture(
    scope="module",
    params=short_of(ENGINES, *(name for name in ENGINES if name != "vllm split in two")),
)
def models(
    trained: dict[str, Any], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[str, Any]]:
    config, replicas = ENGINES[request.param]
    runtime = RUNTIME.model_copy(update={"generator_replicas": replicas})
    specs = {"generator": GeneratorSpec(tiny_model, 32, config)}
    with open_models(runtime, tmp_path_factory.mktemp("logs"), specs) as handles:
        yield handles | trained


@pytest.fixture(scope="module")
def prompts() -> PromptBatch:
    rng = np.random.default_rng(3)
    ids = Ragged.of(rng.integers(5, 280, size=n) for n in (4, 9, 5, 7, 3, 8))
    return PromptBatch(input_ids=ids, seed=np.arange(100, 100 + NUM_PROMPTS))


def generate(models: dict[str, Any], rows: PromptBatch, version: int, sampling: Sampling = SAMPLING) -> ReplyBatch:
    return ray.get(models["generator"].generate.remote(rows, sampling, version))


def tensors(tiny_model: Path, scale: float) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor * scale) for name, tensor in sorted(load_file(tiny_model / "model.safetensors").items())]


def test_the_life_of_a_generator(models: dict[str, Any], prompts: PromptBatch, tiny_model: Path) -> None:
    """One story, since each start of vLLM takes seconds: sample, agree, refuse, update, agree again."""
    # Whoever is killed leaves nothing in shared memory: what is mapped has no name any more.
    assert [line for line in shared_memory_of(models["generator"]) if not line.endswith("(deleted)")] == []

    first = generate(models, prompts, 0)
    assert (first.response_ids.lengths >= 1).all()

    # As the temperature goes to 0, replies are transformers' greedy ones.
    cold = generate(models, prompts, 0, dataclasses.replace(SAMPLING, temperature=0.01))
    assert [reply.tolist() for reply in cold.response_ids] == _greedy(tiny_model, prompts)

    # Options leave the same tokens in every library: one, here, of logits with a penalty on what was said.
    choosy = dataclasses.replace(SAMPLING, top_k=1, repetition_penalty=1.5)
    chosen = [reply.tolist() for reply in generate(models, prompts, 0, choosy).response_ids]
    assert chosen == _greedy(tiny_model, prompts, penalty=1.5)
    # A text ends a reply with the token that completes it.
    tokenizer = load_tokenizer(tiny_model)
    text = next(text for reply in chosen if (text := tokenizer.decode(reply[1], skip_special_tokens=True)).strip())
    stopped = generate(models, prompts, 0, dataclasses.replace(choosy, stop=(text,)))
    for reply, whole, ended in zip(stopped.response_ids, chosen, stopped.ended, strict=True):
        assert whole[: len(reply)] == reply.tolist()
        assert (text in tokenizer.decode(whole, skip_special_tokens=True)) <= bool(ended)
    assert sum(stopped.response_ids.lengths) < sum(map(len, chosen))

    # A reply depends on its own seed alone, not on its neighbours.
    some = generate(models, prompts.take([4, 1]), 0)
    same(some, first.take([4, 1]))

    # More prompts than an engine takes in at a time.
    many = generate(models, prompts.take([0, 1, 2, 3, 4, 5] * 20), 0)
    same(many.take(range(len(many) - NUM_PROMPTS, len(many))), first)

    # On a CPU a generator that sleeps gives up the memory of its cache, and takes it again.
    ray.get(models["generator"].sleep.remote())
    same(generate(models, prompts, 0), first)

    # Log-probabilities are those of an independent forward, at the sampling temperature.
    asked = [ids.tolist() for ids in prompts.input_ids]
    rows = _with_replies(prompts, first)
    scored = ray.get(models["scorer"].score.remote(rows)).ref_logprobs
    np.testing.assert_allclose(first.rollout_logprobs.values, scored.values, atol=2e-5)

    # Another version than the one held is refused.
    with pytest.raises(Exception, match="policy version 1") as stale:
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
    same(generate(models, prompts, 0), first)

    # One that breaks off inside the engine's load, after some layers took it over, is undone.
    misfit = [
        (n, t[:-1].clone() if n == "model.layers.1.mlp.up_proj.weight" else t) for n, t in tensors(tiny_model, 3.0)
    ]
    with pytest.raises(Exception, match=r"(?i)size|shape|tensor"):
        ray.get(models["generator"].load_weights.remote(pack(misfit, version=1)))
    same(generate(models, prompts, 0), first)

    # The whole update arrives: replies are now those of the new weights, also through the tied output layer.
    assert ray.get(models["generator"].load_weights.remote(good)) == 1
    second = generate(models, prompts, 1)
    assert not np.array_equal(second.rollout_logprobs.values, first.rollout_logprobs.values)
    expected = _logprobs(tiny_model, tensors(tiny_model, 1.5), asked, second)
    np.testing.assert_allclose(second.rollout_logprobs.values, expected, atol=2e-5)

    # A partial update (a frozen trunk sends nothing) leaves the rest as it was, also of a layer of which a part comes.
    names = ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight")
    some_tensors = [(n, t) for n, t in tensors(tiny_model, 0.5) if n in names]
    assert ray.get(models["generator"].load_weights.remote(pack(some_tensors, version=2))) == 2
    third = generate(models, prompts, 2)
    mixed = dict(tensors(tiny_model, 1.5)) | dict(some_tensors)
    expected = _logprobs(tiny_model, list(mixed.items()), asked, third)
    np.testing.assert_allclose(third.rollout_logprobs.values, expected, atol=2e-5)

    # A checkpoint's files replace all of them.
    ray.get(models["generator"].load_checkpoint.remote(tiny_model, 3))
    same(generate(models, prompts, 3), first)


def _logprobs(
    directory: Path, weights: list[tuple[str, torch.Tensor]], asked: list[list[int]], out: ReplyBatch
) -> list[float]:
    """Log-probabilities of the replies' tokens under `weights`, by transformers in float64."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    lm.load_state_dict({name: tensor.double() for name, tensor in weights}, strict=False)
    lm.tie_weights()
    expected: list[float] = []
    for prompt, ids in zip(asked, out.response_ids, strict=True):
        reply = ids.tolist()
        logits = lm(torch.tensor([prompt + reply])).logits[0].detach() / SAMPLING.temperature
        logp = torch.log_softmax(logits, -1)
        expected += [float(logp[len(prompt) - 1 + t, token]) for t, token in enumerate(reply)]
    return expected


def _greedy(directory: Path, prompts: PromptBatch, penalty: float = 1.0) -> list[list[int]]:
    """What argmax gives, token by token, up to and with the end token; `penalty`: on tokens that are there already."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    replies = []
    for ids in prompts.input_ids:
        tokens, length = ids.tolist(), len(ids)
        while len(tokens) < length + SAMPLING.max_new_tokens:
            logits = lm(torch.tensor([tokens])).logits[0, -1]
            penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
            there = torch.isin(torch.arange(len(logits)), torch.tensor(tokens))
            tokens.append(int(torch.where(there, penalized, logits).argmax()))
            if tokens[-1] in SAMPLING.stop_token_ids:
                break
        replies.append(tokens[length:])
    return replies


def test_replicas_answer_as_one(tiny_model: Path, prompts: PromptBatch, cluster: None, tmp_path: Path) -> None:
    """Two replicas behind a WholeModel, and one engine in this process: the same replies, to the bit."""
    config = GeneratorConfig(engine="transformers")
    torch.set_num_threads(1)
    alone = Generation(tiny_model, 32, config, RUNTIME, EngineRank("cpu"))
    rows = prompts.take([0, 1, 2, 3, 4, 5] * 7).with_columns(seed=np.arange(42))
    asked = [ids.tolist() for ids in rows.input_ids]
    expected = alone.generate(asked, rows.seed.tolist(), SAMPLING, 0)
    two = RUNTIME.model_copy(update={"generator_replicas": 2})
    with open_models(two, tmp_path, {"generator": GeneratorSpec(tiny_model, 32, config)}) as models:
        answer = generate(models, rows, 0)
        one_row = generate(models, rows.take([3]), 0)
        # One replica fails while the other takes the update over: both go back, and both follow the next time.
        update = pack(tensors(tiny_model, 1.5), version=1)
        ray.get(models["generator"].__ray_call__.remote(partial(_tell_second, what=_fail_once)))
        with pytest.raises(Exception, match="disk full"):
            ray.get(models["generator"].load_weights.remote(update))
        back = generate(models, rows, 0)
        assert ray.get(models["generator"].load_weights.remote(update)) == 1
        moved = generate(models, rows, 1)
        # One dies in the middle of an update: the model says so, and is to be built again.
        ray.get(models["generator"].__ray_call__.remote(partial(_tell_second, what=_die)))
        with pytest.raises(Exception, match=r"Workhorse 1 of 2 of 'generator' .* died"):
            ray.get(models["generator"].load_weights.remote(pack(tensors(tiny_model, 2.0), version=2)))
    assert not np.array_equal(moved.rollout_logprobs.values, expected.rollout_logprobs.values)
    same(back, expected)
    same(answer, expected)
    same(one_row, expected.take([3]))


def test_a_sharded_policy_is_followed(models: dict[str, Any], tiny_model: Path, prompts: PromptBatch) -> None:
    """Parameters that ZeRO-3 has cut over two Workhorses."""
    follows(models, tiny_model, prompts)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_mixture_whose_experts_are_shared_is_followed(
    cluster: None, tiny_model: Path, prompts: PromptBatch, tmp_path: Path, kind: str
) -> None:
    """Each Workhorse has two of four experts; vLLM lays its own out anew."""
    model = mixture(tmp_path / "model", tiny_model, kind)
    engine = FSDP2Config(num_workhorses=2, expert_parallel=2)
    training = PPOStageConfig(temperature=SAMPLING.temperature, engine=engine)
    specs: dict[str, Any] = {
        "generator": GeneratorSpec(model, 32, GeneratorConfig()),
        "policy": ModelSpec(model, PPOObjective(training), training=training, new_head=True),
    }
    with open_models(RUNTIME, tmp_path / "logs", specs) as opened:
        follows(opened, model, prompts)


def follows(models: dict[str, Any], directory: Path, prompts: PromptBatch) -> None:
    """The generator samples by the policy's weights after an update, and says so."""
    generator, policy = models["generator"], models["policy"]
    ray.get(generator.load_checkpoint.remote(directory, 0))
    before = generate(models, prompts, 0)
    rows = _with_replies(prompts, before)
    scores = ray.get(policy.score.remote(rows))
    ones = Ragged(np.ones_like(scores.values.values), scores.values.offsets)
    columns = dict.fromkeys(("advantages", "weights", "returns"), ones)
    batch = rows.as_kind(PolicyBatch, old_logprobs=scores.logprobs, values=scores.values, **columns)
    ray.get(policy.train.remote(batch, StepTotals(tokens=10.0), 1e-2))
    ray.get(generator.follow.remote(policy, 1))
    with pytest.raises(Exception) as stale:  # noqa: PT011
        generate(models, prompts, 0)
    assert isinstance(root_cause(stale.value), StaleWeightsError)
    after = generate(models, prompts, 1)
    sampled = after.rollout_logprobs.values
    assert not np.array_equal(sampled, before.rollout_logprobs.values)
    scored = ray.get(policy.score.remote(_with_replies(prompts, after))).logprobs
    np.testing.assert_allclose(sampled, scored.values, atol=2e-5)


def test_a_generator_that_computes_nan_is_refused(
    models: dict[str, Any], nan_model: Path, prompts: PromptBatch, message_texts: Messages
) -> None:
    ray.get(models["generator"].load_checkpoint.remote(nan_model, 9))
    with pytest.raises(Exception) as caught:  # noqa: PT011
        generate(models, prompts, 9)
    cause = root_cause(caught.value)
    assert isinstance(cause, NonFiniteError)
    message_texts.check(str(cause))


def _with_replies(prompts: PromptBatch, rollout: ReplyBatch) -> TextBatch:
    return TextBatch.of([ids.tolist() for ids in prompts.input_ids], rollout.response_ids)


def shared_memory_of(generator: Any) -> list[str]:
    """Lines of the memory maps of a model's Workhorses that are in shared memory."""

    # Not of this module, which the WholeModel would import, and torch with it.
    def ask(model: Any) -> list[str]:
        def look(workhorse: Any) -> list[str]:
            return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]

        return [line for w in model._workhorses for line in ray.get(w.__ray_call__.remote(look))]

    found: list[str] = ray.get(generator.__ray_call__.remote(ask))
    return found


def _tell_second(model: Any, what: Callable[[Any], None]) -> None:
    """Have the second replica of a WholeModel do `what`."""
    ray.get(model._workhorses[1].__ray_call__.remote(what))


def _fail_once(generator: Any) -> None:
    """The next write into the engine breaks off after its first tensor."""
    held = generator._engine.weights
    write = held._write

    def failing(weights: Any, version: int) -> None:
        held._write = write
        write(iter([next(weights)]), version)
        raise OSError("disk full")

    held._write = failing


def _die(generator: Any) -> None:
    """The next write into the engine ends the process after its first tensor."""
    held = generator._engine.weights
    write = held._write

    def dying(weights: Any, version: int) -> None:
        write(iter([next(weights)]), version)
        os._exit(1)

    held._write = dying
