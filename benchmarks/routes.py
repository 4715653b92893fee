"""Compare GRPO with and without replayed routes, on a small mixture whose sampler computes in bfloat16.

    python -m benchmarks.routes --out docs/routes.md

Everything runs in this process: transformers' generator with its weights cast to bfloat16, and the trainer's objective
on the same weights in float32. Both ways begin with the same weights and prompts; a seed draws weights and replies.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
import torch

from xray_runtime.cluster.micro_batches import as_arrays, as_tensors
from xray_runtime.data.batch import Rollout, StepTotals, TextBatch
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.engines.generation import Generation
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sampling import EngineRank, Sampling
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.methods.ppo.config import KLConfig, PPOStageConfig
from xray_runtime.methods.ppo.experience import build_experience
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.methods.ppo.routing import RoutingName
from xray_runtime.models.causal_lm import fresh_llama, load_model, save_model
from xray_runtime.models.config import FreshBase
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import training_loss

SEEDS, ITERATIONS = 3, 30
GROUPS, GROUP_SIZE, NEW_TOKENS = 8, 8, 12
LR, EPOCHS = 2e-3, 2
SCALE = 4.0
"""New weights are enlarged by this, so that it matters which experts a token takes."""
PROMPT_IDS = range(5, 60)
SIZES = FreshBase(
    kind="fresh", vocab_size=300, hidden_size=64, num_layers=4, num_heads=2, num_kv_heads=2, intermediate_size=64,
    num_experts=16, num_experts_per_tok=4, max_positions=64,
)  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """One run; a number an iteration."""

    mismatch: list[float]
    """Mean |log-probability difference| of sampler and trainer, nats per token, by the routes that are trained on."""
    mismatch_own: list[float]
    """By the trainer's own routes."""
    reward: list[float]


def run(seed: int, routing: RoutingName, directory: Path) -> Curve:
    """GRPO for replies in the upper half of the vocabulary."""
    tokenizer = train_tokenizer(["a few words to learn letters from"] * 5, SIZES.vocab_size)
    vocabulary = len(tokenizer)
    lm: Any = fresh_llama(SIZES, tokenizer, seed)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter *= SCALE if parameter.dim() > 1 else 1.0
    save_model(lm, tokenizer, directory)
    config = PPOStageConfig(
        method="grpo", samples_per_prompt=GROUP_SIZE, prompts_per_iteration=GROUPS, minibatch_size=GROUPS * GROUP_SIZE,
        max_new_tokens=NEW_TOKENS, routing=routing, reward_scaling="none", kl=KLConfig(coef=0.0, controller="fixed"),
        truncated="penalize", truncation_penalty=0.0,
    )  # fmt: skip
    module, objective = HeadedLM(load_model(directory)).eval(), PPOObjective(config)
    sampler = Generation(directory, 64, GeneratorConfig(engine="transformers"), RuntimeConfig(), EngineRank("cpu"))
    sampled_by: Any = sampler._sampler
    sampled_by._lm.bfloat16()
    sampling = Sampling(NEW_TOKENS, 1.0, (tokenizer.eos_token_id,), tokenizer.pad_token_id, routes=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
    curve = Curve([], [], [])
    for iteration in range(ITERATIONS):
        sampled_by._lm.load_state_dict(module.lm.state_dict())
        rollout, text = _rollout(sampler, sampling, seed, iteration)
        with torch.no_grad():
            scores = as_arrays(objective.score(module, as_tensors(text.with_columns(**rollout.pick("route_ids")))))
        if routing == "own":
            scores = scores.with_columns(logprobs=scores.own_route_logprobs)
            rollout = rollout.with_columns(route_ids=None)
        scores = scores.with_columns(ref_logprobs=scores.logprobs)
        rewards = torch.tensor([float((ids > vocabulary // 2).mean()) for ids in rollout.response_ids])
        experience = build_experience(config, text, rollout, scores, rewards, 0.0)
        curve.mismatch.append(experience.metrics["rollout/mismatch"])
        curve.mismatch_own.append(experience.metrics["rollout/mismatch_own_routes"])
        curve.reward.append(float(rewards.mean()))
        totals = StepTotals.of(experience.rows)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            training_loss(module, objective, as_tensors(experience.rows), totals).loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    return curve


def _rollout(sampler: Generation, sampling: Sampling, seed: int, iteration: int) -> tuple[Rollout, TextBatch]:
    draw = np.random.default_rng((seed, iteration))
    prompts = [draw.choice(PROMPT_IDS, size=6).tolist() for _ in range(GROUPS)]
    prompts = [prompt for prompt in prompts for _ in range(GROUP_SIZE)]
    seeds = draw.integers(2**62, size=len(prompts)).tolist()
    replies = sampler.generate(prompts, seeds, sampling, 0)
    rows = np.arange(len(prompts))
    rollout = replies.as_kind(Rollout, seed=np.array(seeds), version=rows * 0, prompt=rows)
    return rollout, TextBatch.of(prompts, replies.response_ids).with_columns(id=rows)


def page(curves: dict[tuple[int, str], Curve]) -> Iterator[str]:
    """The page of the docs, line by line."""
    yield "# Routes, replayed and not"
    yield ""
    yield "Made by `python -m benchmarks.routes --out docs/routes.md` (CPU). GRPO on a new mixture of 4 layers with"
    yield "16 experts, 4 of them a token. Its sampler computes in bfloat16 and its trainer in float32, so that routes"
    yield "differ; both ways begin with the same weights and prompts, and take"
    yield f"{ITERATIONS} iterations of {GROUPS} × {GROUP_SIZE} replies of at most {NEW_TOKENS} tokens."
    yield ""
    yield "- *mismatch*: mean |log-probability difference| of the two at one version, nats a token, all iterations;"
    yield "  *trained*: by the routes that the policy learns by; *own*: by those that the trainer would choose;"
    yield "- *reward*: mean of the first and of the last five iterations, at most 1."
    yield ""
    yield "| seed | `routing` | mismatch, trained | mismatch, own | reward, first | reward, last |"
    yield "|---|---|---|---|---|---|"
    mean = statistics.fmean
    for (seed, routing), curve in curves.items():
        numbers = mean(curve.mismatch), mean(curve.mismatch_own), mean(curve.reward[:5]), mean(curve.reward[-5:])
        yield f"| {seed} | {routing} | " + " | ".join(f"{number:.4f}" for number in numbers) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    curves: dict[tuple[int, str], Curve] = {}
    for seed in range(SEEDS):
        for routing in get_args(RoutingName):
            with TemporaryDirectory() as place:
                curves[seed, routing] = run(seed, routing, Path(place))
    text = "\n".join(page(curves)) + "\n"
    print(text)
    if out is not None:
        out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
