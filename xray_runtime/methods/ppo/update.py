"""The update of an iteration: several epochs of clipped minibatch steps on policy and critic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xray_runtime.cluster.protocols import ModelHandle, get
from xray_runtime.data.batch import PolicyBatch, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged, join_ragged
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.sampling.agent_rows import BranchRows
from xray_runtime.methods.common.sampling.types import Experience
from xray_runtime.methods.common.training.steps import (
    Learning,
    PolicySums,
    SkippedSteps,
    Stepper,
    StepStatistics,
    ValueSums,
)
from xray_runtime.methods.ppo.experience import measured

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.methods.common.inputs import PPOInputs
    from xray_runtime.methods.ppo.config import PPOConfig


@dataclass(frozen=True)
class MinibatchStep:
    """One step of the policy's optimizer and, where there is a critic, of the critic's."""

    num_tokens: float
    lr: float
    policy: StepStatistics[PolicySums]
    critic: StepStatistics[ValueSums] | None
    """Only for a separate critic."""
    taken: bool
    """False: a model skipped it."""


@dataclass(frozen=True)
class Update:
    steps: list[MinibatchStep]
    epochs: float
    stopped_early: bool
    """By `stop_kl`."""
    times_trained: np.ndarray
    """Number of optimizer steps on each row of the experience [B] int32."""
    experience: Experience
    """With the log-probabilities that the first step computed."""


class Updater:
    """Trains the policy, and the critic where there is one, on experience; `skipped` counts the steps they skip."""

    def __init__(
        self, stage: Stage[PPOConfig, PPOInputs], models: Mapping[str, ModelHandle], skipped: SkippedSteps
    ) -> None:
        self._stage, self._config, self._policy = stage, stage.config, models["policy"]
        self._per_epoch = self._config.rollout_size // self._config.minibatch_size
        learning: list[Learning[Any]] = [Learning("policy", self._policy, PolicySums)]
        if "critic" in models:
            learning.append(Learning("critic", models["critic"], ValueSums, self._config.critic_lr))
        planned = self._config.iterations * self._config.epochs * self._per_epoch
        self._stepper = Stepper(stage, learning, planned, skipped)

    def update(self, experience: Experience, iteration: int, kl_coef: float) -> Update:
        """Run all epochs over an iteration's experience, or fewer if `stop_kl` is exceeded.

        Raises:
            RuntimeError: a model has more ranks than there are replies with a reward.
            NonFiniteError: a model skipped more steps than `max_skipped_steps`.
        """
        config, count = self._config, experience.num_rows
        num_minibatches = self._num_minibatches(count)
        epochs = _minibatches(self._stage, experience.rows.alike_prompts(), num_minibatches, iteration)
        steps: list[MinibatchStep] = []
        times_trained, stopped_early = np.zeros(count, np.int32), False
        for epoch, minibatches in zip(range(config.epochs), epochs, strict=False):
            for number, index in enumerate(minibatches):
                at = (iteration * config.epochs + epoch) * self._per_epoch + number
                if not steps:
                    experience = self._score_later(experience, index)
                step, logprobs = self._step(experience.rows.take(index), at, kl_coef)
                if logprobs is not None:
                    experience = measured(config, experience, _replaced(experience, index, logprobs))
                steps.append(step)
                times_trained[index] += step.taken
                stopped_early = step.taken and self._moved_too_far(step)
                if stopped_early:
                    break
            if stopped_early:
                break
        return Update(steps, len(steps) / num_minibatches, stopped_early, times_trained, experience)

    def _score_later(self, experience: Experience, first: np.ndarray) -> Experience:
        """Score the rows outside the `first` minibatch if some of them are not: replies without a reward, which are
        left out, move the others to other minibatches than were expected."""
        later = np.setdiff1d(np.arange(experience.num_rows), first)
        rows = experience.rows.take(later)
        if not _unscored(rows):
            return experience
        text = TextBatch.of_columns(rows.pick("input_ids", "prompt_lengths", "id"))
        answer = get(self._policy.score.remote(text, 1 + bool(self._config.lag)))
        return measured(self._config, experience, _replaced(experience, later, answer.logprobs))

    def _num_minibatches(self, num_replies: int) -> int:
        """Fewer minibatches than planned if few replies have a reward."""
        engines = (self._config.engine, self._config.critic_engine or self._config.engine)
        count = min(self._per_epoch, num_replies // max(engine.data_parallel for engine in engines))
        if not count:
            few = f"{self._stage.name}: only {num_replies} replies have a reward"
            raise RuntimeError(f"{few}, fewer than the model's data-parallel ranks")
        return count

    def _step(self, batch: PolicyBatch, at: int, kl_coef: float) -> tuple[MinibatchStep, Ragged | None]:
        """(the step, the policy's log-probabilities before it if the batch lacks them)."""
        unread = ("old_logprobs", "weights") if _unscored(batch) else ("rollout_logprobs",)
        batch = batch.with_columns(**dict.fromkeys(unread))
        batch = BranchRows.of(batch, batch.branches).rows if "branches" in batch else batch
        totals = StepTotals.of(batch, kl_coef=kl_coef)
        step = self._stepper.step(at, batch, totals, int(bool(self._config.lag)))
        policy, *critic = step.results
        logprobs = step.columns.old_logprobs if "old_logprobs" in step.columns else None
        return MinibatchStep(totals.tokens, step.lr, policy, critic[0] if critic else None, step.taken), logprobs

    def _moved_too_far(self, step: MinibatchStep) -> bool:
        limit = self._config.stop_kl
        return limit is not None and not step.policy.sums.approx_kl_sum / step.num_tokens <= limit  # NaN too


def first_minibatch(stage: Stage[PPOConfig, PPOInputs], rows: TextBatch, iteration: int) -> np.ndarray:
    """The rows of a rollout that an iteration's first step trains on if all get a reward; none if tied groups may be
    replaced before the rollout is split into minibatches."""
    config = stage.config
    count = config.rollout_size // config.minibatch_size
    if count > 1 and config.resample_rounds:
        return np.zeros(0, np.int64)
    return next(_minibatches(stage, rows.alike_prompts(), count, iteration))[0]


def _minibatches(
    stage: Stage[PPOConfig, PPOInputs], prompts: np.ndarray, count: int, iteration: int
) -> Iterator[list[np.ndarray]]:
    """The places of each minibatch's rows, epoch after epoch; `prompts` [B] as from `TextBatch.alike_prompts`."""
    order = np.random.default_rng(derive_seed(stage.seed, stage.name, "minibatches", iteration))
    while True:
        yield np.array_split(shuffled(prompts, order), count)


def _unscored(rows: PolicyBatch) -> bool:
    """Whether some rows lack the policy's log-probabilities."""
    return bool((rows.old_logprobs.lengths < rows.rollout_logprobs.lengths).any())


def _replaced(experience: Experience, places: np.ndarray, by: Ragged) -> Ragged:
    """The experience's `old_logprobs` with `by` at `places`."""
    others = np.setdiff1d(np.arange(experience.num_rows), places)
    kept = experience.rows.old_logprobs[others]
    return join_ragged([kept, by], [others.tolist(), places.tolist()])


def shuffled(groups: np.ndarray, order: np.random.Generator) -> np.ndarray:
    """The places of `groups` [B] in a random order in which those of one group follow one another.

    Replies to one prompt are trained in one minibatch where they fit, so that their prompt is computed once.
    """
    _, number = np.unique(groups, return_inverse=True)
    drawn = order.permutation(number.max() + 1)
    places: np.ndarray = np.argsort(np.argsort(drawn)[number], kind="stable")
    return places
