"""What generators say of the distribution that they draw from: its likeliest tokens, and the set that a cut leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from tests.component.layouts import short_of
from tests.component.models import same
from xray_runtime.cluster.micro_batches import as_arrays, as_tensors
from xray_runtime.data.batch import REPLAYED, ReplyBatch, Scores, TextBatch
from xray_runtime.engines.generation import Generation
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sampling import EngineRank, Sampling
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.methods.common.training.finite import check_rollout
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.models.causal_lm import load_model
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import ReferenceObjective

RUNTIME = RuntimeConfig(threads=1, device="cpu", generator_memory_gib=0.25)
TEMPERATURE, NUM_TOP = 0.7, 5
PLAIN = Sampling(max_new_tokens=9, temperature=TEMPERATURE, stop_token_ids=(1,), pad_token_id=0)
CUTS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.6, "top_k": 128},
    "min_p": {"min_p": 0.5, "top_k": 128},
    "all": {"top_p": 0.8, "min_p": 0.3, "top_k": 20},
}
PROMPTS = [[5, 9, 12, 40, 41, 42, 43, 44], [7, 8], [30, 31, 32, 33], list(range(100, 140))] * 3
SEEDS = list(range(12))
SAMPLED = {
    "plain": PLAIN,
    "top": replace(PLAIN, top_logprobs=NUM_TOP),
    "everything": replace(PLAIN, top_logprobs=256),
    **{name: replace(PLAIN, **cut, kept=True, top_logprobs=NUM_TOP) for name, cut in CUTS.items()},
}
ROUNDING = 2e-5


@ray.remote(num_cpus=0, max_calls=1)
def _sampled(directory: Path, engine: str) -> dict[str, ReplyBatch]:
    made = Generation(directory, 64, GeneratorConfig(engine=engine), RUNTIME, EngineRank("cpu"))
    return {name: made.generate(PROMPTS, SEEDS, sampling, 0) for name, sampling in SAMPLED.items()}


@pytest.fixture(scope="module", params=short_of(["vllm", "transformers", "deepspeed"], "vllm", "transformers"))
def made(cluster: None, tiny_model: Path, request: pytest.FixtureRequest) -> dict[str, ReplyBatch]:
    return ray.get(_sampled.remote(tiny_model, request.param))


def distributions(directory: Path, replies: ReplyBatch) -> torch.Tensor:
    """Log-probabilities at the sampling temperature at each place of the replies [R, V], by transformers, float64."""
    lm, found = load_model(directory).double().eval(), []
    for prompt, reply in zip(PROMPTS, replies.response_ids, strict=True):
        with torch.no_grad():
            logits = lm(input_ids=torch.tensor([[*prompt, *reply.tolist()]])).logits[0]
        found.append(torch.log_softmax(logits[len(prompt) - 1 : -1] / TEMPERATURE, -1))
    return torch.cat(found)


def scored(directory: Path, replies: ReplyBatch, objective: Any) -> Scores:
    rows = TextBatch.of(PROMPTS, replies.response_ids).with_columns(**replies.pick(*REPLAYED))
    with torch.no_grad():
        return as_arrays(objective.score(HeadedLM(load_model(directory).eval()), as_tensors(rows)))


def test_the_likeliest_tokens(tiny_model: Path, made: dict[str, ReplyBatch]) -> None:
    plain, top = made["plain"], made["top"]
    check_rollout(top, len(PROMPTS), SAMPLED["top"])
    same(top.with_columns(topk_ids=None, topk_logprobs=None), plain)
    expected = distributions(tiny_model, top).topk(NUM_TOP)
    assert top.topk_ids.values.dtype == np.int32
    assert top.topk_logprobs.values.dtype == np.float32
    np.testing.assert_array_equal(top.topk_ids.offsets, top.response_ids.offsets)
    np.testing.assert_allclose(top.topk_logprobs.values, expected.values.numpy(), rtol=0, atol=ROUNDING)
    # Tokens that are equally likely up to rounding may come in any order.
    apart = (expected.values[:, :-1] - expected.values[:, 1:]).min(-1).values > ROUNDING
    np.testing.assert_array_equal(top.topk_ids.values[apart], expected.indices.numpy()[apart])
    sums = np.exp(made["everything"].topk_logprobs.values.astype(np.float64)).sum(-1)
    assert (sums < 1 + ROUNDING).all()


def left(logp: torch.Tensor, min_p: float = 0.0, top_k: int | None = None, top_p: float = 1.0) -> torch.Tensor:
    """Which tokens the cuts leave [V], by their definitions, in vLLM's order."""
    p = logp.exp()
    kept = p >= min_p * p.max()
    if top_k is not None:
        kept &= p >= torch.where(kept, p, 0).topk(top_k).values[-1]
    p = torch.where(kept, p, 0) / p[kept].sum()
    likeliest = p.argsort(descending=True)
    before = p[likeliest].cumsum(-1) - p[likeliest]
    nucleus = torch.zeros_like(kept)
    nucleus[likeliest[before < top_p]] = True
    return kept & nucleus


@pytest.mark.parametrize("cut", CUTS)
def test_a_kept_set_is_what_the_cut_leaves_and_is_replayed(
    tiny_model: Path, made: dict[str, ReplyBatch], cut: str
) -> None:
    replies = made[cut]
    check_rollout(replies, len(PROMPTS), SAMPLED[cut])
    counts = replies.kept_counts.values
    assert 1 < counts.mean() < 100
    sets = np.split(replies.kept_ids.values, counts.cumsum()[:-1])
    whole = distributions(tiny_model, replies)
    expected = [left(logp, **CUTS[cut]).nonzero().squeeze(-1).tolist() for logp in whole]
    # A token at the very edge may fall on either side of it.
    differ = [row for row, ids in enumerate(sets) if ids.tolist() != expected[row]]
    assert len(differ) <= len(sets) // 50
    mass = np.array([float(logp[ids].exp().sum()) for logp, ids in zip(whole, sets, strict=True)])
    config = PPOStageConfig(temperature=TEMPERATURE)
    policy = scored(tiny_model, replies, PPOObjective(config))
    np.testing.assert_allclose(policy.kept_mass.values, mass, rtol=0, atol=ROUNDING)
    np.testing.assert_allclose(policy.logprobs.values, replies.rollout_logprobs.values, rtol=0, atol=ROUNDING)
    reference = scored(tiny_model, replies, ReferenceObjective(TEMPERATURE))
    np.testing.assert_array_equal(reference.ref_logprobs.values, policy.logprobs.values)
    # Without the sets the policy's log-probabilities are off by the log of the mass that was cut.
    others = scored(tiny_model, replies.with_columns(kept_ids=None, kept_counts=None), PPOObjective(config))
    off = replies.rollout_logprobs.values - others.logprobs.values
    np.testing.assert_allclose(off, -np.log(mass), rtol=0, atol=2 * ROUNDING)
    assert off.mean() > 0.05
    # The likeliest are those of the set, and no more.
    there = replies.topk_ids.values >= 0
    np.testing.assert_array_equal(there.sum(-1), np.minimum(counts, NUM_TOP))
    assert (np.exp(replies.topk_logprobs.values.astype(np.float64)).sum(-1) < 1 + ROUNDING).all()
