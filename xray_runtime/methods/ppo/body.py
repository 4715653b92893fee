"""Stage `ppo`: policy gradients on the reward with a KL to the reference: PPO, and methods without a critic (GRPO, …).

The loop of `run` is the algorithm; each iteration:

    sync      policy ── weights, version, checksums ──▶ generator
    generate  prompts ──▶ generator ──▶ replies with their log-probabilities
    score     policy (where something reads it), reference, critic, teacher and reward model score the replies; with
              `resample_rounds`, other prompts replace those whose replies all score the same
    update    several epochs of clipped minibatch steps on policy and critic
    ledger    the iteration's rows are written into the checkpoint

`validation` may score the policy before an iteration; `watch` looks for a hacked reward after it and may end the stage.

With `lag: n` the replies of n iterations later are sampled during `score` and `update` of this one; `generate` only
waits for the rest. With `in_flight_updates` unfinished replies go on while weights change (`in_flight`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.algorithms.kl import KLController, make_kl_controller
from xray_runtime.algorithms.rewards import MovingMeans, RunningMoments
from xray_runtime.cluster.protocols import ModelHandle, get
from xray_runtime.data.batching import Cursor
from xray_runtime.data.gold import GoldScore, load_gold
from xray_runtime.data.pairs import TRAIN, prompt_text
from xray_runtime.engines.sampling import Sampling
from xray_runtime.engines.sampling_config import LARGEST_SET
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.mismatch import check_mismatch
from xray_runtime.methods.common.sampling.episode_source import (
    EpisodeSampler,
    SamplerSetup,
    open_episodes,
)
from xray_runtime.methods.common.sampling.replies_in_flight import open_in_flight
from xray_runtime.methods.common.sampling.scoring import RolloutScorer, ScoredRollout
from xray_runtime.methods.common.sampling.turns import sampling_turn, trained_models
from xray_runtime.methods.common.training.dataset import max_prompt_tokens
from xray_runtime.methods.common.training.prompts import UniquePrompts
from xray_runtime.methods.common.training.resumable import KeepsFiles, Resumable
from xray_runtime.methods.common.training.steps import SkippedSteps
from xray_runtime.methods.ppo.curriculum import PromptOrder
from xray_runtime.methods.ppo.experience import Experience, build_experience, scaled_rewards
from xray_runtime.methods.ppo.functions import Functions, RowFacts, weight_function
from xray_runtime.methods.ppo.hacking_monitor import HackingMonitor
from xray_runtime.methods.ppo.in_flight import InFlight
from xray_runtime.methods.ppo.ledger_writer import Ledger
from xray_runtime.methods.ppo.metrics import PhaseClock, iteration_metrics, summary
from xray_runtime.methods.ppo.models import check_rows, is_own_reference, model_specs, stage_adapter
from xray_runtime.methods.ppo.rollouts import Rollouts, num_probe_rows
from xray_runtime.methods.ppo.routing import check_family
from xray_runtime.methods.ppo.teachers import Teachers
from xray_runtime.methods.ppo.update import Updater
from xray_runtime.methods.ppo.validation import Validation
from xray_runtime.models.causal_lm import load_tokenizer, stops_of
from xray_runtime.rewards.reward_sources import RewardSources

if TYPE_CHECKING:
    from torch import Tensor

    from xray_runtime.cluster.stage import Stage
    from xray_runtime.data.tokenizer import Tokenizer
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.ppo.config import PPOConfig
    from xray_runtime.methods.ppo.kind import PPOInputs


def run(stage: Stage[PPOConfig, PPOInputs], out: Path, recorder: Recorder) -> int:
    """Writes the policy in Hugging Face form, with the critic's head or, in critic/, the critic. `validation` adds
    validation.json and may keep an earlier version; signs of a hacked reward add watch.json."""
    config = stage.config
    with _opened(stage, out, recorder) as loop:
        for iteration in range(loop.state.restore(), config.iterations):
            clock = PhaseClock(f"{stage.name}, iteration {iteration}")
            with clock.phase("sync"):
                sent, probe = loop.rollouts.sync(loop.models["policy"], iteration)
            with clock.phase("generate"), loop.sampling_turn():
                validation_replies = loop.validation.sample(loop.models["generator"], iteration, loop.episodes)
                loop.rollouts.request(iteration)
                rollout = loop.rollouts.take()
            with clock.phase("score"):
                validated = loop.validation.score(loop.models, validation_replies, iteration)
                scored = loop.scorer.score(rollout, iteration)
            scored = _without_ties(loop, scored, iteration, clock)
            loop.order.record(*scored.rewards_by_prompt(loop.rewards.weights))
            with clock.phase("score"):
                rewards, experience = loop.experience(scored)
                probe = probe if loop.functions.scores_policy or config.lag else loop.mismatch(scored)
            with clock.phase("update"):
                update = loop.updater.update(experience, iteration, loop.kl.coef)
            with clock.phase("generate"):
                loop.rollouts.wait()
            golds = loop.gold_scores(scored)
            with clock.phase("ledger"):
                loop.ledger.write(
                    iteration, scored, rewards, experience, update.times_trained, sent, golds, loop.rollouts.dropped
                )
            loop.kl.update(experience.reference_kl, experience.num_rows)

            results = rollout, scored, experience, update
            metrics = iteration_metrics(config, iteration, clock, loop.prompts, loop.rewards, results, probe, golds)
            metrics |= validated | {"kl/coef": loop.kl.coef} | loop.rollouts.metrics(scored.rollout, iteration)
            metrics |= loop.order.metrics()
            metrics |= loop.monitor.check(iteration, metrics, scored.rollout)
            recorder.metrics(loop.skipped.metrics(metrics), iteration)
            recorder.progress(iteration + 1, config.iterations, "iterations", summary(metrics))
            if loop.monitor.end is not None:
                break
            loop.monitor.keep(loop.models, iteration + 1)
            loop.state.step_done(iteration + 1, config.iterations)
        loop.ledger.show(recorder, loop.tokenizer)
        return _published(loop, out)


@dataclass(frozen=True)
class _Loop:
    """The objects that iterations share."""

    stage: Stage[PPOConfig, PPOInputs]
    tokenizer: Tokenizer
    models: Mapping[str, ModelHandle]
    prompts: UniquePrompts
    order: PromptOrder
    episodes: EpisodeSampler | None
    rollouts: Rollouts
    rewards: RewardSources
    scorer: RolloutScorer
    functions: Functions
    updater: Updater
    kl: KLController
    moments: RunningMoments
    moving: MovingMeans
    skipped: SkippedSteps
    gold: GoldScore | None
    monitor: HackingMonitor
    validation: Validation
    ledger: Ledger
    state: Resumable

    def sampling_turn(self) -> AbstractContextManager[None]:
        """The generator's turn on GPUs that it shares; a sync comes before the next, unless prompts are replaced."""
        synced_next = not self.stage.config.resample_rounds
        trained = trained_models(self.models).values()
        return sampling_turn(self.stage.runtime, self.models["generator"], trained, synced_next=synced_next)

    def experience(self, scored: ScoredRollout) -> tuple[Tensor, Experience]:
        """(scaled reward of each reply [B], what the update learns from)."""
        config = self.stage.config
        rewards = scaled_rewards(config, self.rewards, scored.sources, self.moments)
        # With a lag, the rollout's policy is not the trainer's: a probe is checked instead.
        limit = math.inf if config.lag else config.mismatch_limit(self.stage.runtime.device)
        given = scored.text, scored.rollout, scored.scores, rewards
        columns = self.prompts.columns(scored.rollout.prompt.tolist()) if self.functions.read_columns else {}
        facts = RowFacts(columns, scored.sources.values, self.rewards.weights, self.moving)
        return rewards, build_experience(config, *given, self.kl.coef, self.functions, limit, facts)

    def mismatch(self, scored: ScoredRollout) -> float:
        """That of generator and trainer over a few rows, where the policy scored none. Raises as `check_mismatch`."""
        found = self.scorer.mismatch(scored, num_probe_rows(self.stage))
        check_mismatch(found, self.stage.config.mismatch_limit(self.stage.runtime.device))
        return found

    def gold_scores(self, scored: ScoredRollout) -> list[float] | None:
        """Gold score of each reply; None without `gold`."""
        if self.gold is None:
            return None
        prompts = [prompt_text(self.prompts[i][0]) for i in scored.rollout.prompt.tolist()]
        return self.gold(prompts, scored.replies)


@contextmanager
def _opened(stage: Stage[PPOConfig, PPOInputs], out: Path, recorder: Recorder) -> Iterator[_Loop]:
    config, dataset, policy = stage.config, stage.inputs.prompts.path, stage.inputs.policy.path
    if config.routing == "replay":
        check_family(policy)
    tokenizer, limit = load_tokenizer(policy), max_prompt_tokens(dataset, policy, config.max_response_tokens)
    prompts = UniquePrompts(tokenizer, dataset / TRAIN, limit, stage.seal)
    cursor = Cursor(len(prompts), derive_seed(stage.seed, stage.name, "prompts"))
    order = PromptOrder(config.curriculum, prompts, cursor, weight_function(stage))
    functions, kl = Functions.of_stage(stage), make_kl_controller(config.kl)
    layers, stops = config.trainable_layers, stops_of(policy, tokenizer)
    rewards = RewardSources(stage, tokenizer, None if layers is None else (policy, layers))
    gold = load_gold(config.gold, stage.functions) if config.gold else None
    moments, moving, skipped = RunningMoments(), MovingMeans(), SkippedSteps()
    monitor, ledger = HackingMonitor(stage, recorder, rewards.weights), Ledger(stage, out, prompts, rewards)
    sampling = _sampling(config, functions, stops, tokenizer.pad_token_id)
    validation = Validation(stage, rewards, tokenizer, sampling, stops, stage.kept or recorder.log_dir, limit)
    limit = max(prompts.room, validation.room)
    teachers = None if config.distillation is None else Teachers(stage, tokenizer, prompts)
    specs = model_specs(stage, rewards, functions, limit, teachers)
    check_rows(stage, specs, prompts)
    with (
        stage.open_models(specs | validation.specs()) as models,
        ExitStack() as stack,
    ):
        played = models["generator"], sampling, tokenizer, limit, recorder.log_dir, out, models.get("champion")
        setup = SamplerSetup(stage, *played)
        episodes = stack.enter_context(open_episodes(setup))
        source = stack.enter_context(open_in_flight(setup, episodes))
        in_flight = None if source is None else InFlight(source, config, prompts)
        rollouts = Rollouts(models["generator"], stage, sampling, prompts, order, episodes, in_flight)
        keep_files: list[KeepsFiles] = [rollouts, order, monitor, validation.best.versions, ledger]
        state = {"skipped": skipped, "watch": monitor.state, "validation": validation.best.state}
        state |= {"cursor": cursor, "kl": kl, "moments": moments, "moving": moving}
        state |= {} if in_flight is None else {"in_flight": in_flight.state}
        yield _Loop(
            stage=stage,
            tokenizer=tokenizer,
            models=models,
            prompts=prompts,
            order=order,
            episodes=episodes,
            rollouts=rollouts,
            rewards=rewards,
            scorer=RolloutScorer(
                models, rewards, tokenizer, stops, prompts, is_own_reference(stage), functions.scores_policy, teachers
            ),
            functions=functions,
            updater=Updater(stage, models, skipped),
            kl=kl,
            moments=moments,
            moving=moving,
            skipped=skipped,
            gold=gold,
            monitor=monitor,
            validation=validation,
            ledger=ledger,
            state=Resumable(recorder, trained_models(models), keep_files, **state),
        )


def _sampling(config: PPOConfig, functions: Functions, stops: tuple[int, ...], padding: int) -> Sampling:
    """How replies to learn from are sampled, and what comes with them."""
    return Sampling(
        config.max_new_tokens,
        config.temperature,
        stops,
        padding,
        stop=tuple(config.stop),
        top_p=config.top_p,
        top_k=config.top_k or (LARGEST_SET if config.cuts else None),
        min_p=config.min_p,
        routes=config.routing == "replay",
        top_logprobs=config.top_logprobs if config.score_centering or functions.read_top else 0,
        kept=bool(config.cuts),
    )


def _without_ties(loop: _Loop, scored: ScoredRollout, iteration: int, clock: PhaseClock) -> ScoredRollout:
    """Replace prompts whose replies all score the same by other prompts, in up to `resample_rounds` rounds."""
    config = loop.stage.config
    layouts = config.engine, config.critic_engine or config.engine, config.frozen
    most_ranks = max(layout.data_parallel for layout in layouts)
    for attempt in range(config.resample_rounds):
        tied = scored.tied(loop.rewards.weights, config.samples_per_prompt)
        if len(tied) < most_ranks:
            break  # none, or fewer than the ranks that would share them
        with clock.phase("generate"), loop.sampling_turn():
            others = loop.rollouts.sample_others(iteration, attempt, len(tied) // config.samples_per_prompt)
        with clock.phase("score"):
            first_id = (attempt + 1) * config.rollout_size
            scored = scored.replaced(tied, loop.scorer.score(others, iteration, first_id))
    return scored


def _published(loop: _Loop, out: Path) -> int:
    """Write the policy that the stage ends with, and have a generator with models of its own read it from the files;
    returns the number of its updates."""
    loop.monitor.write_record(out)
    if loop.monitor.end is not None:
        loop.monitor.versions.copy(loop.monitor.end, out)  # the one before the signs of a hacked reward
        return loop.monitor.end
    config, models = loop.stage.config, loop.models
    done = config.iterations
    if config.validation is not None:
        # As before any iteration: what is still in flight waits until the generator has them.
        loop.rollouts.sync(models["policy"], done)
        loop.validation.score_last(models, done, loop.episodes)
    kept = loop.validation.best.save(models, out, done, loop.validation.record())
    # An earlier version was compared with transformers' model as it was written, and no model has it any more.
    synced = stage_adapter(loop.stage)
    # A generator that got merged weights has none to read where an adapter alone was written.
    has_weights = synced is not None or config.lora is None or config.lora.publish == "merged"
    reads = config.generator.capabilities.own_models and not config.in_flight_updates and has_weights
    if kept == done and reads:
        get(models["generator"].load_checkpoint.remote(out, done + 1))
        loop.rollouts.probe(models["policy"], done + 1, loop.sampling_turn())
    return kept
