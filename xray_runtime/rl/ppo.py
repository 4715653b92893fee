"""Stage `ppo`: policy gradients against the reward, near the reference: PPO, and what needs no critic (GRPO, RLOO, …).

The loop of `run` is the algorithm; each iteration:

    sync      policy ── weights, version, checksums ──▶ generator
    generate  prompts ──▶ generator ──▶ replies with their log-probabilities
    score     policy, reference, critic and reward model score the replies at the same time;
              with `resample_rounds` other prompts take the place of those whose replies all score alike
    update    several epochs of clipped minibatch steps on policy and critic
    ledger    what was sampled, scored and trained on is kept in the checkpoint

Before an iteration `validation` may look at the policy; after it `watch` looks for a hacked reward, and may end the
stage.

With `lag: 1` the replies of the next iteration are sampled during `score` and `update` of this one, and `generate` is
what is left to wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.algorithms.checking import check_advantages, check_loss
from xray_runtime.algorithms.kl import make_kl_controller
from xray_runtime.algorithms.moments import RunningMoments
from xray_runtime.config.sources import is_function
from xray_runtime.data.batching import Cursor
from xray_runtime.data.gold import import_function, load_gold
from xray_runtime.data.pairs import TRAIN, prompt_text
from xray_runtime.data.rows import num_response_tokens, num_rows, take
from xray_runtime.engines.generation.sampling import Sampling
from xray_runtime.graph.artifacts import VALUE_HEAD
from xray_runtime.models.causal_lm import load_tokenizer, stops_of
from xray_runtime.models.objectives import ReferenceObjective
from xray_runtime.models.ppo_objectives import CriticObjective, PPOObjective
from xray_runtime.models.tensor_file import same_trunk
from xray_runtime.rl.episodes import episode_means, open_episodes
from xray_runtime.rl.experience import Experience, build_experience, reward_metrics, scaled_rewards
from xray_runtime.rl.hacking_monitor import Watch
from xray_runtime.rl.ledger_writer import Ledger
from xray_runtime.rl.model_roles import ppo_models
from xray_runtime.rl.reward_sources import RewardSources
from xray_runtime.rl.rollouts import Rollouts
from xray_runtime.rl.scoring import Scorer
from xray_runtime.rl.validation import Validation
from xray_runtime.seeding import derive_seed
from xray_runtime.training.common import PhaseClock, UniquePrompts, lr_at, max_prompt_tokens
from xray_runtime.training.finite import SkippedSteps
from xray_runtime.training.resumable import KeepsFiles, Resumable
from xray_runtime.workers.generator_spec import GeneratorSpec
from xray_runtime.workers.model_spec import BranchSpec, ModelSpec
from xray_runtime.workers.protocols import ModelHandle, get, get_all

if TYPE_CHECKING:
    from xray_runtime.config.ppo import PPOConfig
    from xray_runtime.graph.inputs import PPOInputs
    from xray_runtime.graph.kind import Recorder, Stage


def run(stage: Stage[PPOConfig, PPOInputs], out: Path, recorder: Recorder) -> int:
    """Writes the policy in Hugging Face form, with the critic's head or, in critic/, the critic; with `validation` the
    version that is kept, and validation.json; in watch.json why it ended early, or went on in spite of a sign of
    a hacked reward."""
    config, dataset = stage.config, stage.inputs.prompts.path
    tokenizer = load_tokenizer(stage.inputs.policy.path)
    limit = max_prompt_tokens(dataset, stage.inputs.policy.path, config.max_response_tokens)
    prompts = UniquePrompts(tokenizer, dataset / TRAIN, limit, stage.seal)
    cursor = Cursor(len(prompts), derive_seed(stage.seed, stage.name, "prompts"))
    gold = load_gold(config.gold, stage.functions) if config.gold else None
    kl = make_kl_controller(config.kl)
    estimator = _own(stage, "advantages", check_advantages)
    layers = config.trainable_layers
    rewards = RewardSources(stage, tokenizer, None if layers is None else (stage.inputs.policy.path, layers))
    moments, skipped = RunningMoments(), SkippedSteps()
    watch = Watch(stage, recorder, rewards.weights)
    ledger = Ledger(stage, out, prompts, rewards)
    stops = stops_of(stage.inputs.policy.path, tokenizer)
    sampling = Sampling(
        config.max_new_tokens, config.temperature, stops, tokenizer.pad_token_id, stop=tuple(config.stop)
    )
    validation = Validation(stage, rewards, tokenizer, sampling, stops, stage.kept or recorder.log_dir, limit)
    specs = _models(stage, rewards, limit)

    with (
        stage.open_models(specs | validation.specs()) as models,
        open_episodes(stage, models["generator"], sampling, tokenizer, limit, recorder.log_dir) as episodes,
    ):
        trained = {role: models[role] for role in ("policy", "critic") if role in models}
        rollouts = Rollouts(models["generator"], stage, sampling, prompts, cursor, episodes)
        scorer = Scorer(models, config, rewards, tokenizer, stops, prompts, _one_trunk(config, specs))
        keep_files: list[KeepsFiles] = [rollouts, watch, validation.best, ledger]
        remembered = {"skipped": skipped, "watch": watch.state, "validation": validation.best.state}
        state = Resumable(recorder, trained, keep_files, cursor=cursor, kl=kl, moments=moments, **remembered)
        for iteration in range(state.restore(), config.iterations):
            clock, sent = PhaseClock(f"{stage.name}, iteration {iteration}"), None
            with clock.phase("sync"):
                if iteration:
                    sent = get(models["generator"].follow.remote(models["policy"], iteration))
                probed = {"sync/mismatch": rollouts.probe(models["policy"], iteration)} if config.lag else {}
            with clock.phase("generate"), _asleep(trained if stage.runtime.trainer_sleeps else {}):
                looked = validation.sample(models["generator"], iteration, episodes)
                rollouts.ask(iteration)
                rollout, sampled = rollouts.take()
            with clock.phase("score"):
                probed |= validation.score(models, looked, iteration)
                scored, replaced = scorer.score(rollout.prompts, sampled, iteration), 0
            for attempt in range(config.resample_rounds):
                tied = scored.tied(rewards.weights, config.samples_per_prompt)
                if len(tied) < _most_ranks(config):
                    break  # none, or too few to share out
                with clock.phase("generate"), _asleep(trained if stage.runtime.trainer_sleeps else {}):
                    others, sampled = rollouts.sample_others(iteration, attempt, len(tied) // config.samples_per_prompt)
                with clock.phase("score"):
                    first_id = (attempt + 1) * config.rollout_size
                    scored = scored.replaced(tied, scorer.score(others, sampled, iteration, first_id))
                replaced += len(tied)
            with clock.phase("score"):
                scaled = scaled_rewards(config, rewards, scored.sources, moments)
                experience = build_experience(
                    config, scored.rows, scored.sampled, scored.scores, scaled, kl.coef, estimator
                )
                _check_mismatch(probed.get("sync/mismatch", experience.metrics["rollout/mismatch"]), config)
            with clock.phase("update"):
                times_trained = np.zeros(num_rows(experience.rows), np.int32)
                sums = _update(models, stage, experience, iteration, kl.coef, skipped, times_trained)
            with clock.phase("generate"):
                rollouts.wait()
            asked = [prompt_text(prompts[i][0]) for i in scored.prompts]
            golds = gold(asked, scored.replies) if gold is not None else None
            with clock.phase("ledger"):
                ledger.write(iteration, scored, scaled, experience, times_trained, sent, golds)
            kl.update(experience.metrics["kl/reference_k1"], num_rows(experience.rows))

            metrics = experience.metrics | reward_metrics(rewards, scored.sources) | _update_metrics(sums)
            metrics |= {"kl/coef": kl.coef} | probed | clock.metrics() | (prompts.metrics() if not iteration else {})
            metrics |= {"rollout/version": rollout.version, "rollout/lag": iteration - rollout.version}
            metrics["rollout/distinct_replies"] = len(set(scored.replies)) / len(scored.replies)
            if config.environment is not None:
                metrics |= {f"rollout/{name}": mean for name, mean in episode_means(scored.sampled).items()}
            if config.resample_rounds:
                metrics["rollout/resampled_groups"] = replaced / config.samples_per_prompt
            if golds is not None:
                metrics |= {"reward/gold": float(np.mean(golds)), "reward/gold_std": float(np.std(golds))}
            if not config.lag:
                metrics["speed/generate_tokens_per_s"] = experience.num_tokens / clock.seconds["generate"]
            metrics["speed/score_tokens_per_s"] = experience.num_tokens / clock.seconds["score"]
            metrics["speed/update_tokens_per_s"] = experience.num_tokens * sums["epochs"] / clock.seconds["update"]
            metrics["speed/response_tokens_per_s"] = experience.num_tokens / metrics["seconds/total"]
            metrics |= watch.look(iteration, metrics, scored.sampled)
            recorder.metrics(skipped.metrics(metrics), iteration)
            recorder.progress(iteration + 1, config.iterations, "iterations", _note(metrics))
            if watch.end is not None:
                break
            watch.keep(models, iteration + 1)
            state.step_done(iteration + 1, config.iterations)
        ledger.show(recorder, tokenizer)
        return watch.finish(out) or validation.finish(models, out, config.iterations, episodes)


def _models(
    stage: Stage[PPOConfig, PPOInputs], rewards: RewardSources, max_prompt: int
) -> dict[str, ModelSpec | GeneratorSpec]:
    config, policy = stage.config, stage.inputs.policy.path
    reference = stage.inputs.reference.path if stage.inputs.reference is not None else policy
    layers, shared_critic = config.trainable_layers, config.critic_in_use == "shared"
    head, trained = policy / VALUE_HEAD, policy / "critic"
    models: dict[str, ModelSpec | GeneratorSpec] = {
        "generator": GeneratorSpec(policy, max_prompt + config.max_response_tokens, config.generator),
        "policy": ModelSpec(
            policy,
            PPOObjective(config, _own(stage, "loss", partial(check_loss, gradient=False))),
            training=config,
            new_head=shared_critic,
            head=head if shared_critic and head.exists() else None,
            trainable_layers=layers,
            # Above a frozen trunk what has the same trunk is a branch of the policy, not another model.
            branches=rewards.branches | ({"reference": BranchSpec(reference)} if layers is not None else {}),
            adapter_seed=derive_seed(stage.seed, stage.name, "policy", "adapters"),
        ),
        "reference": ModelSpec(reference, ReferenceObjective(config.temperature), frozen=config.frozen),
        "critic": ModelSpec(
            trained if trained.exists() else reference,
            CriticObjective(config),
            training=config.model_copy(update={"engine": config.critic_engine or config.engine}),
            new_head=True,
            head=trained / VALUE_HEAD if trained.exists() else None,
            trainable_layers=layers,
            adapter_seed=derive_seed(stage.seed, stage.name, "critic", "adapters"),
        ),
        **rewards.specs(),
    }
    return {role: spec for role, spec in models.items() if role in ppo_models(config)}


def _own(stage: Stage[PPOConfig, PPOInputs], field: str, check: Callable[[Any, str], None]) -> Any:
    """The user's function that a field of the config names, tried; None where it names a built-in."""
    name = getattr(stage.config, field)
    if not is_function(name):
        return None
    function = stage.functions.get(name) or import_function(name, field)
    check(function, name)
    return function


def _one_trunk(config: PPOConfig, specs: Mapping[str, ModelSpec | GeneratorSpec]) -> bool:
    """Whether policy and critic are two models that stand on the same frozen trunk, and compute it alike."""
    layers, engine = config.trainable_layers, config.critic_engine or config.engine
    if layers is None or "critic" not in specs or engine.precision != config.engine.precision:
        return False
    return same_trunk(specs["policy"].directory, specs["critic"].directory, layers)


def _most_ranks(config: PPOConfig) -> int:
    """Over how many ranks the rows of one scoring are shared out, at most."""
    return max(layout.data_parallel for layout in (config.engine, config.critic_engine or config.engine, config.frozen))


@contextmanager
def _asleep(models: dict[str, ModelHandle]) -> Iterator[None]:
    get_all([model.sleep.remote() for model in models.values()])
    yield
    get_all([model.wake_up.remote() for model in models.values()])


def _check_mismatch(mismatch: float, config: PPOConfig) -> None:
    # Checksums say that the bytes arrived; this says that the generator computes the policy with them.
    if not mismatch <= config.max_mismatch:  # NaN too
        raise RuntimeError(
            f"generator and trainer disagree by {mismatch:.3g} nats a token at one policy version (ppo max_mismatch = "
            f"{config.max_mismatch}): the generator does not hold the policy's weights"
        )


def _update(
    models: dict[str, ModelHandle],
    stage: Stage[PPOConfig, PPOInputs],
    experience: Experience,
    iteration: int,
    kl_coef: float,
    skipped: SkippedSteps,
    times_trained: np.ndarray,
) -> dict[str, float]:
    """Epochs of minibatch steps; sums of their statistics, with `updates`, `epochs`, `tokens` and `stopped_early`.

    Steps that a model refused are in no sum but `updates`. Counts in `times_trained` the steps that each row was in.
    """
    config = stage.config
    per_epoch = config.rollout_size // config.minibatch_size
    planned = config.iterations * config.epochs * per_epoch
    # Replies without a reward are not there: minibatches are then a little smaller, and fewer only where few are left.
    num_scored, engines = num_rows(experience.rows), (config.engine, config.critic_engine or config.engine)
    parts = min(per_epoch, num_scored // max(engine.data_parallel for engine in engines))
    if not parts:
        raise RuntimeError(f"{stage.name}: {num_scored} replies have a reward, fewer than there are Workhorses")
    sums: dict[str, float] = {"updates": 0.0, "tokens": 0.0, "stopped_early": 0.0}
    trained = [role for role in ("policy", "critic") if role in models]
    order = np.random.default_rng(derive_seed(stage.seed, stage.name, "minibatches", iteration))
    for epoch in range(config.epochs):
        for number, index in enumerate(np.array_split(order.permutation(num_scored), parts)):
            step = (iteration * config.epochs + epoch) * per_epoch + number
            batch = take(experience.rows, index)
            tokens = float(num_response_tokens(batch))
            at_once = (2 if "critic" in models else 1) + config.lag
            lr = lr_at(config, step, planned)
            totals = {"tokens": tokens, "rows": float(len(index)), "kl_coef": kl_coef}
            calls = [models["policy"].train.remote(batch, totals, lr, at_once)]
            if "critic" in models:
                critic_lr = lr_at(config, step, planned, peak=config.critic_lr)
                calls.append(models["critic"].train.remote(batch, totals, critic_lr, at_once))
            policy, *critic = get_all(calls)
            sums |= {"lr": lr, "updates": sums["updates"] + 1.0}
            # Each of the two steps, or refuses to, by itself.
            took = [skipped.took(stage, role, step, s) for role, s in zip(trained, (policy, *critic), strict=True)]
            if not all(took):
                continue
            times_trained[index] += 1
            stats = {**policy, **{f"critic_{k}" if k == "grad_norm" else k: v for c in critic for k, v in c.items()}}
            for name, value in (stats | {"tokens": tokens}).items():
                sums[name] = sums.get(name, 0.0) + value
            if config.stop_kl is not None and not policy["approx_kl_sum"] / tokens <= config.stop_kl:  # NaN too
                sums["stopped_early"] = 1.0
                break
        if sums["stopped_early"]:
            break
    sums["epochs"] = sums["updates"] / parts
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
    metrics = {name: sums[key] / tokens for name, key in per_token.items() if key in sums}
    metrics |= {"policy/grad_norm": sums.get("grad_norm", 0.0) / updates, "policy/lr": sums["lr"]}
    if "critic_grad_norm" in sums:
        metrics["value/grad_norm"] = sums["critic_grad_norm"] / updates
    return metrics | {"policy/updates": sums["updates"], "policy/stopped_early": sums["stopped_early"]}


def _note(metrics: dict[str, float]) -> str:
    gold = f"gold {metrics['reward/gold']:+.3f} " if "reward/gold" in metrics else ""
    phases = " ".join(f"{name} {metrics[f'seconds/{name}']:.1f}s" for name in ("sync", "generate", "score", "update"))
    return f"reward {metrics['reward/mean']:+.3f} {gold}KL {metrics['kl/reference_k1']:.2f} | {phases}"
