"""Routes from a generator to an update: aligned with their tokens, and those that were sampled by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from tests.component.layouts import short_of
from tests.component.models import mixture, same
from tests.component.processes import open_models
from xray_runtime.cluster.micro_batches import as_tensors
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.pool.libraries import worker_options
from xray_runtime.data.batch import PolicyBatch, ReplyBatch, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.generation import Generation
from xray_runtime.engines.layouts import EngineConfig, GeneratorConfig
from xray_runtime.engines.sampling import EngineRank, Sampling
from xray_runtime.engines.trainers.deepspeed.config import DeepSpeedConfig
from xray_runtime.engines.trainers.fsdp2.config import FSDP2Config
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.methods.common.training.finite import check_rollout
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.models.causal_lm import load_model
from xray_runtime.models.family import family_of
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import training_loss
from xray_runtime.models.routing import recorded_routes

RUNTIME = RuntimeConfig(threads=1, device="cpu", generator_memory_gib=0.25)
SAMPLING = Sampling(max_new_tokens=9, temperature=0.7, stop_token_ids=(1,), pad_token_id=0, routes=True)
PROMPTS = [[5, 9, 12, 40, 41, 42, 43, 44], [7, 8], [30, 31, 32, 33], list(range(100, 140))] * 3
SEEDS = list(range(12))


def generation(directory: Path, engine: str) -> Generation:
    return Generation(directory, 64, GeneratorConfig(engine=engine), RUNTIME, EngineRank("cpu"))


@ray.remote(num_cpus=0, max_calls=1)
def _sampled(directory: Path, engine: str) -> dict[str, ReplyBatch]:
    made = generation(directory, engine)
    first = made.generate(PROMPTS, SEEDS, replace(SAMPLING, routes=False), 0)
    routed = made.generate(PROMPTS, SEEDS, SAMPLING, 0)
    # What one sampling brought is forgotten, and a cache that is warm is not read.
    return {"plain": first, "routed": routed, "some": made.generate(PROMPTS[1:3], SEEDS[1:3], SAMPLING, 0)}


def texts(replies: ReplyBatch, prompts: list[list[int]] = PROMPTS) -> TextBatch:
    return TextBatch.of(prompts, replies.response_ids)


def own(directory: Path, rows: TextBatch) -> tuple[np.ndarray, np.ndarray]:
    """(ids, weights) that transformers chooses for each token of the whole rows, one row at a time."""
    lm = load_model(directory).eval()
    found = []
    with recorded_routes(lm, family_of(lm.config.model_type)) as recorded, torch.no_grad():
        for ids in rows.input_ids:
            lm(input_ids=torch.from_numpy(ids)[None])
            found.append(recorded.rows(1))
    ids, weights = (np.concatenate([routes[part][0] for routes in found]) for part in range(2))
    return ids, weights


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize("kind", short_of(["qwen3_moe", "mixtral", "olmoe"], "qwen3_moe"))
def test_a_generator_says_the_routes_that_transformers_takes(
    cluster: None, tiny_model: Path, tmp_path: Path, engine: str, kind: str
) -> None:
    directory = mixture(tmp_path / "model", tiny_model, kind)
    made = ray.get(_sampled.options(**worker_options(f"generator:{engine}")).remote(directory, engine))
    replies = made["routed"]
    check_rollout(replies, len(PROMPTS), SAMPLING)
    same(replies.with_columns(route_ids=None, route_weights=None), made["plain"])
    # An expert's sums depend on how many tokens take it, and so, in the last bits, on the other rows.
    some, expected = made["some"], replies.take([1, 2])
    np.testing.assert_array_equal(some.response_ids.values, expected.response_ids.values)
    np.testing.assert_array_equal(some.route_ids.values, expected.route_ids.values)
    np.testing.assert_allclose(some.route_weights.values, expected.route_weights.values, atol=2e-6)
    rows = texts(replies)
    assert replies.route_ids.values.shape == (len(rows.input_ids.values), 2, 2)
    np.testing.assert_array_equal(replies.route_ids.offsets, rows.input_ids.offsets)
    last = rows.input_ids.offsets[1:] - 1
    assert (replies.route_ids.values[last] == 255).all()
    assert (replies.route_weights.values[last] == 0).all()
    ids, weights = own(directory, rows)
    known = np.delete(np.arange(len(ids)), last)
    # Engines differ in the order of two experts, whose weights then differ too.
    found, wanted = replies.route_ids.values[known], ids[known]
    np.testing.assert_array_equal(np.sort(found), np.sort(wanted))
    by_id = [
        np.take_along_axis(w, i.argsort(-1), -1)
        for w, i in ((replies.route_weights.values[known], found), (weights[known], wanted))
    ]
    np.testing.assert_allclose(*by_id, atol=2e-6)


LAYOUTS = {
    "one process": DeepSpeedConfig(),
    "recomputed": DeepSpeedConfig(activation_checkpointing=True, micro_batch_tokens=64),
    "ZeRO-1": DeepSpeedConfig(zero_stage=1, num_workhorses=2),
    "ZeRO-3": DeepSpeedConfig(zero_stage=3, num_workhorses=2, activation_checkpointing=True),
    "FSDP2": FSDP2Config(num_workhorses=2, activation_checkpointing=True),
    "experts shared": FSDP2Config(num_workhorses=2, expert_parallel=2),
    "rows shared": FSDP2Config(num_workhorses=2, sequence_parallel=2),
}
REPLIES = [[11, 6, 80, 7], [4, 4], [7, 2, 3, 9, 9, 9], [8], [15, 16], [9, 30], [11, 6, 80], [5, 5]]
TOTALS = StepTotals(tokens=22.0, rows=8.0)


def forced_rows() -> PolicyBatch:
    """Rows whose routes are no model's, the same for the same prompt."""
    rows = TextBatch.of(PROMPTS[:4] * 2, REPLIES)
    first = np.concatenate([(np.cumsum(ids) % 4) for ids in rows.input_ids])
    ids = np.stack([first, (first + 1 + first % 3) % 4], -1).astype(np.uint8)
    ids = np.stack([ids, ids[:, ::-1]], 1)
    ids[rows.input_ids.offsets[1:] - 1] = 255
    offsets = Ragged.of(REPLIES).offsets
    noise = np.random.default_rng(0).normal(size=(4, offsets[-1])).astype(np.float32)
    columns = zip(("old_logprobs", "advantages", "weights", "ref_logprobs"), noise, strict=True)
    return rows.as_kind(
        PolicyBatch,
        route_ids=Ragged(ids, rows.input_ids.offsets),
        **{name: Ragged(values - 5.0 * ("log" in name), offsets) for name, values in columns},
    )


def plainly(directory: Path, rows: PolicyBatch) -> tuple[np.ndarray, float]:
    """(log-probabilities of replies with the routes, norm of the gradient) by transformers, a row at a time."""
    config = PPOStageConfig(advantages="grpo", samples_per_prompt=2)
    module = HeadedLM(load_model(directory).eval())
    module.packs = False
    found = []
    for row in range(len(rows)):
        one = as_tensors(rows.take([row]))
        training_loss(module, PPOObjective(config), one, TOTALS).loss.backward()
        with torch.no_grad():
            found.append(PPOObjective(config).score(module, one).logprobs.values.numpy())
    norm = torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()
    return np.concatenate(found), float(norm)


@pytest.mark.parametrize("layout", short_of(LAYOUTS, "ZeRO-3", "experts shared"))
def test_every_layout_replays_the_same_routes(cluster: None, tiny_model: Path, tmp_path: Path, layout: str) -> None:
    directory, rows = mixture(tmp_path / "model", tiny_model, "qwen3_moe"), forced_rows()
    engine: EngineConfig = LAYOUTS[layout]
    config = PPOStageConfig(advantages="grpo", samples_per_prompt=2, engine=engine)
    text = TextBatch.of_columns(rows.pick("input_ids", "prompt_lengths", "route_ids"))
    specs: dict[str, Any] = {"policy": ModelSpec(directory, PPOObjective(config), training=config)}
    with open_models(RUNTIME, tmp_path / "logs", specs) as opened:
        scores = ray.get(opened["policy"].score.remote(text))
        answer = ray.get(opened["policy"].train.remote(rows, TOTALS, 1e-9))
    logprobs, norm = plainly(directory, rows)
    np.testing.assert_allclose(scores.logprobs.values, logprobs, atol=2e-5)
    assert np.abs(scores.own_route_logprobs.values - logprobs).max() > 1e-3
    assert answer["grad_norm"] == pytest.approx(norm, rel=1e-4)
