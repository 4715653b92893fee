"""Stage `evaluate`: the tuned policy against the SFT model on held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from safetensors.torch import load_file

from xray_runtime.algorithms.kl import kl_summary
from xray_runtime.algorithms.statistics import bootstrap_interval, distinct_n, wins
from xray_runtime.config.evaluate import EvaluateConfig
from xray_runtime.data.gold import load_gold
from xray_runtime.data.pairs import Messages, prompt_text, read_examples
from xray_runtime.data.tokenizing import decode_replies
from xray_runtime.engines.generation.sampling import Sampling
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.models.objectives import ReferenceObjective, RewardObjective
from xray_runtime.seeding import derive_seed
from xray_runtime.stages.common import (
    closed,
    frozen_layout,
    generator_spec,
    max_prompt_tokens,
    text_rows,
    unique_prompts,
)
from xray_runtime.stages.reward import HEAD_FILE
from xray_runtime.stages.spec import Recorder, StageSpec
from xray_runtime.weights.object_store import pack
from xray_runtime.workers.rows import Rows, pad
from xray_runtime.workers.specs import GeneratorSpec, ModelSpec
from xray_runtime.workers.whole_model import open_models

SIDES = ("before", "after")
"""The SFT model and the tuned policy."""


def run(spec: StageSpec, out: Path, recorder: Recorder) -> int:
    """Writes evaluation.json (the `evaluation` of lifecycle.json), samples.json (pairs a person can read) and
    prompts.json (all prompts it was done on, for whoever checks that none was trained on)."""
    config = EvaluateConfig.model_validate(spec.sections["evaluate"])
    sft, policy, reward = spec.parent("sft"), spec.parent("policy"), spec.parent("reward")
    tokenizer = load_tokenizer(sft)
    prompts = unique_prompts(
        tokenizer, read_examples(spec.parent("dataset") / "heldout.jsonl"), max_prompt_tokens(spec)
    )
    order = np.random.default_rng(derive_seed(spec.seed, "evaluate", "prompts")).permutation(len(prompts))
    prompts = [prompts[i] for i in order[: config.num_prompts]]
    frozen = frozen_layout(spec)
    models: dict[str, ModelSpec | GeneratorSpec] = {
        "generator": generator_spec(spec, sft, config.max_new_tokens),
        "before": ModelSpec(sft, ReferenceObjective(config.temperature), frozen=frozen),
        "after": ModelSpec(policy, ReferenceObjective(config.temperature), frozen=frozen),
        "reward": ModelSpec(reward, RewardObjective(), head=reward / HEAD_FILE, frozen=frozen),
    }
    replies: dict[str, list[list[int]]] = {}
    with open_models(spec.runtime, recorder.log_dir, models) as handles:
        generator = handles["generator"]
        for version, side in enumerate(SIDES):
            if version:
                weights = load_file(policy / "model.safetensors")
                ray.get(generator.load_weights.remote(pack(sorted(weights.items()), version)))
            replies[side] = _sample(generator, spec, config, tokenizer, [ids for _, ids in prompts], version)
            recorder.progress(version + 1, 3, "steps", f"sampled {side} PPO")
        kl = _kl(handles, tokenizer, config, prompts, replies["after"])
        rewards = {side: _rewards(handles["reward"], tokenizer, prompts, replies[side]) for side in SIDES}
    summary = json.loads((reward / "reward.json").read_text())
    rewards = {side: (scores - summary["mean"]) / summary["std"] for side, scores in rewards.items()}
    texts = {side: decode_replies(tokenizer, replies[side]) for side in SIDES}
    asked = [prompt_text(messages) for messages, _ in prompts]
    gold = load_gold(spec.sections["gold"]) if spec.sections["gold"] else None
    golds = {side: torch.tensor(gold(asked, texts[side])) for side in SIDES} if gold is not None else None

    evaluation = _evaluation(config, spec.seed, replies, rewards, golds, kl)
    record_replies(out, recorder, "evaluation", "evaluate", evaluation, asked, texts, rewards, golds, config)
    recorder.progress(3, 3, "steps", f"win rate {evaluation['win_rate']:.2f}")
    return 0


def record_replies(
    out: Path,
    recorder: Recorder,
    name: str,
    prefix: str,
    summary: dict[str, Any],
    asked: list[str],
    texts: dict[str, list[str]],
    rewards: dict[str, torch.Tensor],
    golds: dict[str, torch.Tensor] | None,
    config: EvaluateConfig,
) -> None:
    """Write `summary` as NAME.json and metrics `prefix`/…, the prompts, and replies of each side next to each other."""
    samples: list[dict[str, Any]] = [
        dict[str, Any]({"prompt": asked[i]})
        | {side: texts[side][i] for side in texts}
        | {f"reward_{side}": float(rewards[side][i]) for side in texts}
        | {f"gold_{side}": None if golds is None else float(golds[side][i]) for side in texts}
        for i in range(min(config.num_samples_shown, len(asked)))
    ]
    (out / f"{name}.json").write_text(json.dumps(summary, indent=2, sort_keys=True) + "\n")
    (out / "prompts.json").write_text(json.dumps(asked, indent=1, ensure_ascii=False) + "\n")
    (out / "samples.json").write_text(json.dumps(samples, indent=2, ensure_ascii=False) + "\n")
    recorder.metrics({f"{prefix}/{k}": float(v) for k, v in summary.items() if isinstance(v, int | float)}, step=0)
    recorder.table("samples", list(samples[0]), [list(sample.values()) for sample in samples])


def _sample(
    generator: Any, spec: StageSpec, config: EvaluateConfig, tokenizer: Any, prompts: list[list[int]], version: int
) -> list[list[int]]:
    ids, lengths = pad(prompts, tokenizer.pad_token_id)
    seeds = np.array([derive_seed(spec.seed, "evaluate", "sample", row) for row in range(len(prompts))])
    sampling = Sampling(config.max_new_tokens, config.temperature, tokenizer.eos_token_id, tokenizer.pad_token_id)
    rows = {"input_ids": ids, "lengths": lengths, "seed": seeds}
    answer: Rows = ray.get(generator.generate.remote(rows, sampling, version))
    return [r[m].tolist() for r, m in zip(answer["response_ids"], answer["response_mask"], strict=True)]


def _kl(
    handles: dict[str, Any],
    tokenizer: Any,
    config: EvaluateConfig,
    prompts: list[tuple[Messages, list[int]]],
    replies: list[list[int]],
) -> float:
    """KL(policy ‖ SFT) of a whole reply in nats: k1 over the policy's own samples."""
    rows = text_rows([(ids, reply) for (_, ids), reply in zip(prompts, replies, strict=True)], tokenizer.pad_token_id)
    after, before = ray.get([handles[side].score.remote(rows, config.max_new_tokens) for side in ("after", "before")])
    mask = np.arange(config.max_new_tokens) < (rows["lengths"] - rows["prompt_lengths"])[:, None]
    logprobs, ref_logprobs = (torch.from_numpy(scores["ref_logprobs"]) for scores in (after, before))
    summary = kl_summary(logprobs, ref_logprobs, torch.from_numpy(mask))
    return float(summary["k1"])


def _rewards(
    reward: Any, tokenizer: Any, prompts: list[tuple[Messages, list[int]]], replies: list[list[int]]
) -> torch.Tensor:
    whole = [(ids, closed(reply, tokenizer.eos_token_id)) for (_, ids), reply in zip(prompts, replies, strict=True)]
    scores = ray.get(reward.score.remote(text_rows(whole, tokenizer.pad_token_id)))["scores"]
    return torch.from_numpy(scores).double()


def _evaluation(
    config: EvaluateConfig,
    seed: int,
    replies: dict[str, list[list[int]]],
    rewards: dict[str, torch.Tensor],
    golds: dict[str, torch.Tensor] | None,
    kl: float,
) -> dict[str, Any]:
    judged = golds if golds is not None else rewards

    def interval(x: torch.Tensor, name: str) -> tuple[float, list[float]]:
        mean, low, high = bootstrap_interval(x, config.bootstrap_samples, derive_seed(seed, "evaluate", name))
        return mean, [low, high]

    win_rate, win_ci = interval(wins(judged["after"], judged["before"]), "win_rate")
    evaluation: dict[str, Any] = {
        "samples": len(replies["after"]),
        "judge": "gold" if golds is not None else "reward",
        "win_rate": win_rate,
        "win_rate_ci95": win_ci,
        "kl": kl,
        "gold_before": None,
        "gold_after": None,
        "gold_delta": None,
        "gold_delta_ci95": None,
    }
    if golds is not None:
        delta, delta_ci = interval(golds["after"] - golds["before"], "gold_delta")
        evaluation |= {"gold_delta": delta, "gold_delta_ci95": delta_ci}
    for side in SIDES:
        if golds is not None:
            evaluation[f"gold_{side}"] = float(golds[side].mean())
        evaluation[f"reward_{side}"] = float(rewards[side].mean())
        evaluation[f"length_{side}"] = float(np.mean([len(reply) for reply in replies[side]]))
        evaluation[f"distinct_2_{side}"] = distinct_n(replies[side], 2)
    return evaluation
