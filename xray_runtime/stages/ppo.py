"""Stage `ppo`: proximal policy optimization of the policy against the reward model, near the reference.

The loop of `run` is the algorithm; each iteration:

    sync      policy ── weights, version, checksums ──▶ generator
    generate  prompts ──▶ generator ──▶ replies with their log-probabilities
    score     policy, reference, critic and reward model score the replies at the same time
    update    several epochs of clipped minibatch steps on policy and critic
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray

from xray_runtime.algorithms.kl import make_kl_controller
from xray_runtime.algorithms.moments import RunningMoments
from xray_runtime.config.ppo import PPOStageConfig
from xray_runtime.data.batching import Cursor
from xray_runtime.data.gold import load_gold
from xray_runtime.data.pairs import Messages, prompt_text, read_examples
from xray_runtime.data.tokenizing import decode_replies
from xray_runtime.engines.generation.sampling import Sampling
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.models.objectives import CriticObjective, PPOObjective, ReferenceObjective, RewardObjective
from xray_runtime.seeding import derive_seed
from xray_runtime.stages.common import (
    PhaseClock,
    closed,
    frozen_layout,
    generator_spec,
    lr_at,
    max_prompt_tokens,
    text_rows,
    trainable_layers,
    unique_prompts,
)
from xray_runtime.stages.experience import Experience, build_experience
from xray_runtime.stages.resumable import Resumable
from xray_runtime.stages.reward import HEAD_FILE as REWARD_HEAD_FILE
from xray_runtime.stages.spec import Recorder, StageSpec
from xray_runtime.workers.rows import Rows, pad, take
from xray_runtime.workers.specs import GeneratorSpec, ModelSpec
from xray_runtime.workers.whole_model import open_models

HEAD_FILE = (
    "value_head/head.safetensors"  # in a directory of its own: vLLM loads every safetensors file beside config.json
)


def run(spec: StageSpec, out: Path, recorder: Recorder) -> int:
    """Writes the policy in Hugging Face form, with the critic's head or, in critic/, the critic."""
    config = PPOStageConfig.model_validate(spec.sections["ppo"])
    tokenizer = load_tokenizer(spec.parent("policy"))
    examples = read_examples(spec.parent("dataset") / "train.jsonl")
    prompts = unique_prompts(tokenizer, examples, max_prompt_tokens(spec))
    cursor = Cursor(len(prompts), derive_seed(spec.seed, spec.name, "prompts"))
    gold = load_gold(spec.sections["gold"]) if spec.sections["gold"] else None
    kl = make_kl_controller(config.kl)
    reward_summary = json.loads((spec.parent("reward") / "reward.json").read_text())
    moments = RunningMoments()

    with open_models(spec.runtime, recorder.log_dir, _models(spec, config)) as models:
        trained = {role: models[role] for role in ("policy", "critic") if role in models}
        state = Resumable(recorder, trained, cursor=cursor, kl=kl, moments=moments)
        for iteration in range(state.restore(), config.iterations):
            clock = PhaseClock()
            with clock.phase("sync"):
                if iteration:
                    ray.get(models["generator"].follow.remote(models["policy"], iteration))
            with clock.phase("generate"), _asleep(trained if spec.runtime.trainer_sleeps else {}):
                asked = [prompts[i] for i in cursor.take(config.prompts_per_iteration)]
                rollout = _generate(models["generator"], spec, config, tokenizer, asked, iteration)
            with clock.phase("score"):
                rows, scores = _score(models, config, tokenizer, asked, rollout)
                experience = build_experience(config, rows, rollout, scores, kl.coef, reward_summary, moments)
                _check_mismatch(experience, config)
            with clock.phase("update"):
                sums = _update(models, spec, config, experience, iteration)
            kl.update(experience.metrics["kl/reference_k1"], len(asked))

            replies = _texts(tokenizer, rollout)
            metrics = experience.metrics | _update_metrics(sums) | {"kl/coef": kl.coef} | clock.metrics()
            metrics["rollout/distinct_replies"] = len(set(replies)) / len(replies)
            if gold is not None:
                metrics["reward/gold"] = float(np.mean(gold([prompt_text(m) for m, _ in asked], replies)))
            metrics["speed/generate_tokens_per_s"] = experience.num_tokens / clock.seconds["generate"]
            metrics["speed/score_tokens_per_s"] = experience.num_tokens / clock.seconds["score"]
            metrics["speed/update_tokens_per_s"] = experience.num_tokens * sums["epochs"] / clock.seconds["update"]
            metrics["speed/response_tokens_per_s"] = experience.num_tokens / metrics["seconds/total"]
            recorder.metrics(metrics, iteration)
            recorder.progress(iteration + 1, config.iterations, "iterations", _note(metrics))
            state.step_done(iteration + 1, config.iterations)
        recorder.table(
            "rollout",
            ["prompt", "reply", "reward"],
            [
                [prompt_text(m), reply, float(s)]
                for (m, _), reply, s in zip(asked, replies, scores["scores"], strict=True)
            ],
        )
        ray.get(models["policy"].save.remote(out, HEAD_FILE))
        if "critic" in models:
            ray.get(models["critic"].save.remote(out / "critic", HEAD_FILE))
    return config.iterations


def _models(spec: StageSpec, config: PPOStageConfig) -> dict[str, ModelSpec | GeneratorSpec]:
    policy, reference, reward = spec.parent("policy"), spec.parent("reference"), spec.parent("reward")
    layers, frozen = trainable_layers(spec), frozen_layout(spec)
    shared_critic = config.critic == "shared"
    head = policy / HEAD_FILE
    models: dict[str, ModelSpec | GeneratorSpec] = {
        "generator": generator_spec(spec, policy, config.max_new_tokens),
        "policy": ModelSpec(
            policy,
            PPOObjective(config),
            training=config,
            new_head=shared_critic,
            head=head if shared_critic and head.exists() else None,
            trainable_layers=layers,
            # With a frozen trunk the reference is a second branch on the policy's own trunk, not a second model.
            reference=reference if layers is not None else None,
            adapter_seed=derive_seed(spec.seed, spec.name, "policy", "adapters"),
        ),
        "reward": ModelSpec(reward, RewardObjective(), head=reward / REWARD_HEAD_FILE, frozen=frozen),
    }
    if layers is None:
        models["reference"] = ModelSpec(reference, ReferenceObjective(config.temperature), frozen=frozen)
    if not shared_critic:
        trained = policy / "critic"
        models["critic"] = ModelSpec(
            trained if trained.exists() else reference,
            CriticObjective(config),
            training=config.model_copy(update={"engine": config.critic_engine or config.engine}),
            new_head=True,
            head=trained / HEAD_FILE if trained.exists() else None,
            trainable_layers=layers,
            adapter_seed=derive_seed(spec.seed, spec.name, "critic", "adapters"),
        )
    return models


@contextmanager
def _asleep(models: dict[str, Any]) -> Iterator[None]:
    ray.get([model.sleep.remote() for model in models.values()])
    yield
    ray.get([model.wake_up.remote() for model in models.values()])


def _generate(
    generator: Any,
    spec: StageSpec,
    config: PPOStageConfig,
    tokenizer: Any,
    asked: list[tuple[Messages, list[int]]],
    version: int,
) -> Rows:
    sampling = Sampling(config.max_new_tokens, config.temperature, tokenizer.eos_token_id, tokenizer.pad_token_id)
    ids, lengths = pad((ids for _, ids in asked), tokenizer.pad_token_id)
    seeds = [derive_seed(spec.seed, spec.name, "sample", version, row) for row in range(len(asked))]
    rows = {"input_ids": ids, "lengths": lengths, "seed": np.array(seeds)}
    answer: Rows = ray.get(generator.generate.remote(rows, sampling, version))
    return answer


def _score(
    models: dict[str, Any],
    config: PPOStageConfig,
    tokenizer: Any,
    asked: list[tuple[Messages, list[int]]],
    rollout: Rows,
) -> tuple[Rows, Rows]:
    """Rows of prompt and reply, and every model's scores of them, all models working at the same time."""
    replies = [r[m].tolist() for r, m in zip(rollout["response_ids"], rollout["response_mask"], strict=True)]
    prompts = [ids for _, ids in asked]
    rows = text_rows(list(zip(prompts, replies, strict=True)), tokenizer.pad_token_id)
    rows["id"] = np.arange(len(replies))
    whole = text_rows(
        [(p, closed(r, tokenizer.eos_token_id)) for p, r in zip(prompts, replies, strict=True)], tokenizer.pad_token_id
    )
    calls = [
        models[role].score.remote(rows, config.max_new_tokens)
        for role in ("policy", "reference", "critic")
        if role in models
    ]
    scores: Rows = {}
    for answer in ray.get([*calls, models["reward"].score.remote(whole)]):
        scores |= answer
    return rows, scores


def _check_mismatch(experience: Experience, config: PPOStageConfig) -> None:
    # Checksums say that the bytes arrived; this says that the generator computes the policy with them.
    mismatch = experience.metrics["rollout/mismatch"]
    if mismatch > config.max_mismatch:
        raise RuntimeError(
            f"generator and trainer disagree by {mismatch:.3g} nats a token on a fresh rollout (ppo max_mismatch = "
            f"{config.max_mismatch}): the generator does not hold the policy's weights"
        )


def _update(
    models: dict[str, Any], spec: StageSpec, config: PPOStageConfig, experience: Experience, iteration: int
) -> dict[str, float]:
    """Epochs of minibatch steps; sums of their statistics, with `updates`, `epochs`, `tokens` and `stopped_early`."""
    num_rows = config.prompts_per_iteration
    per_epoch = num_rows // config.minibatch_size
    planned = config.iterations * config.epochs * per_epoch
    sums: dict[str, float] = {"updates": 0.0, "tokens": 0.0, "stopped_early": 0.0}
    order = np.random.default_rng(derive_seed(spec.seed, spec.name, "minibatches", iteration))
    for epoch in range(config.epochs):
        for number, index in enumerate(order.permutation(num_rows).reshape(per_epoch, -1)):
            step = (iteration * config.epochs + epoch) * per_epoch + number
            batch = take(experience.rows, index)
            tokens = float((batch["lengths"] - batch["prompt_lengths"]).sum())
            calls = [models["policy"].train.remote(batch, {"tokens": tokens}, lr_at(config, step, planned))]
            if "critic" in models:
                critic_lr = lr_at(config, step, planned, peak=config.critic_lr)
                calls.append(models["critic"].train.remote(batch, {"tokens": tokens}, critic_lr))
            policy, *critic = ray.get(calls)
            stats = {**policy, **{f"critic_{k}" if k == "grad_norm" else k: v for c in critic for k, v in c.items()}}
            for name, value in (stats | {"updates": 1.0, "tokens": tokens}).items():
                sums[name] = sums.get(name, 0.0) + value
            sums["lr"] = lr_at(config, step, planned)
            if config.stop_kl is not None and policy["approx_kl_sum"] / tokens > config.stop_kl:
                sums["stopped_early"] = 1.0
                break
        if sums["stopped_early"]:
            break
    sums["epochs"] = sums["updates"] / per_epoch
    return sums


def _update_metrics(sums: dict[str, float]) -> dict[str, float]:
    tokens, updates = max(sums["tokens"], 1.0), max(sums["updates"], 1.0)
    per_token = {
        "policy/loss": "policy_loss",
        "policy/entropy": "entropy_sum",
        "policy/clip_fraction": "clip_count",
        "policy/dual_clip_fraction": "dual_clip_count",
        "policy/approx_kl": "approx_kl_sum",
        "value/loss": "value_loss",
        "value/clip_fraction": "value_clip_count",
    }
    metrics = {name: sums[key] / tokens for name, key in per_token.items()}
    metrics |= {"policy/grad_norm": sums["grad_norm"] / updates, "policy/lr": sums["lr"]}
    if "critic_grad_norm" in sums:
        metrics["value/grad_norm"] = sums["critic_grad_norm"] / updates
    return metrics | {"policy/updates": sums["updates"], "policy/stopped_early": sums["stopped_early"]}


def _texts(tokenizer: Any, rollout: Rows) -> list[str]:
    return decode_replies(
        tokenizer, [r[m] for r, m in zip(rollout["response_ids"], rollout["response_mask"], strict=True)]
    )


def _note(metrics: dict[str, float]) -> str:
    gold = f"gold {metrics['reward/gold']:+.3f} " if "reward/gold" in metrics else ""
    phases = " ".join(f"{name} {metrics[f'seconds/{name}']:.1f}s" for name in ("sync", "generate", "score", "update"))
    return f"reward {metrics['reward/mean']:+.3f} {gold}KL {metrics['kl/reference_k1']:.2f} | {phases}"
