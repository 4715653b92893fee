"""The update of an iteration: several epochs of clipped minibatch steps on policy and critic."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xray_runtime.cluster.protocols import ModelHandle
from xray_runtime.data.batch import PolicyBatch, StepTotals, TextBatch
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.sampling.agent_rows import BranchRows
from xray_runtime.methods.common.training.steps import BegunStep, Learning, SkippedSteps, Stepper, TrainingStep
from xray_runtime.methods.ppo.experience import Experience
from xray_runtime.methods.ppo.objectives import OBSERVATIONS

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.methods.ppo.config import PPOConfig, PPOStageConfig
    from xray_runtime.methods.ppo.kind import PPOInputs


@dataclass(frozen=True)
class Update:
    steps: list[TrainingStep]
    epochs: float
    stopped_early: bool
    """By `stop_kl`."""
    times_trained: np.ndarray
    """Number of optimizer steps on each row of the experience [B] int32."""


class Updater:
    """Trains the policy, and the critic where there is one, on experience; `skipped` counts the steps they skip."""

    def __init__(
        self,
        stage: Stage[PPOConfig, PPOInputs],
        models: Mapping[str, ModelHandle],
        skipped: SkippedSteps,
    ) -> None:
        self._stage, self._config = stage, stage.config
        self._per_epoch = self._config.rollout_size // self._config.minibatch_size
        learning: list[Learning] = [Learning("policy", models["policy"])]
        if "critic" in models:
            learning.append(Learning("critic", models["critic"], self._config.critic_lr))
        planned = self._config.iterations * self._config.epochs * self._per_epoch
        self._stepper = Stepper(stage, learning, planned, skipped)

    def update(self, experience: Experience, iteration: int, kl_coef: float) -> Update:
        """Run all epochs over an iteration's experience, or fewer if `stop_kl` is exceeded.

        Raises:
            RuntimeError: a model has more ranks than there are replies with a reward.
            NonFiniteError: a model skipped more steps than `max_skipped_steps`.
        """
        count = experience.num_rows
        num_minibatches = self._num_minibatches(count)
        steps: list[TrainingStep] = []
        times_trained, stopped_early = np.zeros(count, np.int32), False
        for index, step in self._steps(experience, num_minibatches, iteration, kl_coef):
            steps.append(step)
            times_trained[index] += step.taken
            stopped_early = step.taken and self._moved_too_far(step)
            if stopped_early:
                break
        return Update(steps, len(steps) / num_minibatches, stopped_early, times_trained)

    def _steps(
        self, experience: Experience, num_minibatches: int, iteration: int, kl_coef: float
    ) -> Iterator[tuple[np.ndarray, TrainingStep]]:
        """(places of its rows, step), all epochs. A step is begun before the one before it has ended, unless that may
        be the last."""
        config, begun = self._config, deque[tuple[np.ndarray, BegunStep]]()
        ahead = 1 if config.stop_kl is None else 0
        epochs = minibatches(self._stage, experience.rows, num_minibatches, iteration)
        for epoch, parts in zip(range(config.epochs), epochs, strict=False):
            for number, index in enumerate(parts):
                at = (iteration * config.epochs + epoch) * self._per_epoch + number
                begun.append((index, self._begin(experience.rows.take(index), at, kl_coef)))
                if len(begun) > ahead:
                    index, oldest = begun.popleft()
                    yield index, self._stepper.end(oldest)
        for index, oldest in begun:
            yield index, self._stepper.end(oldest)

    def _num_minibatches(self, num_replies: int) -> int:
        """Fewer minibatches than planned if few replies have a reward."""
        engines = (self._config.engine, self._config.critic_engine or self._config.engine)
        count = min(self._per_epoch, num_replies // max(engine.data_parallel for engine in engines))
        if not count:
            few = f"{self._stage.name}: only {num_replies} replies have a reward"
            raise RuntimeError(f"{few}, fewer than the model's data-parallel ranks")
        return count

    def _begin(self, rows: PolicyBatch, at: int, kl_coef: float) -> BegunStep:
        rows = BranchRows.of(rows, rows.branches).rows if "branches" in rows else rows
        return self._stepper.begin(at, rows, step_totals(self._config, rows, kl_coef))

    def _moved_too_far(self, step: TrainingStep) -> bool:
        limit, moved = self._config.stop_kl, step.results["policy"].sums["approx_kl_sum"] / step.totals.tokens
        return limit is not None and not moved <= limit  # NaN too


def step_totals(config: PPOStageConfig, rows: PolicyBatch, kl_coef: float) -> StepTotals:
    """Those of a step over `rows`, with the counts of the config's components."""
    counts = {}
    if config.observation_coef:
        counts[OBSERVATIONS] = float((~rows.response_mask.values).sum())
    return StepTotals.of(rows, kl_coef=kl_coef, counts=counts)


def minibatches(
    stage: Stage[PPOConfig, PPOInputs], rows: TextBatch, count: int, iteration: int
) -> Iterator[list[np.ndarray]]:
    """The places of the rows of each of `count` minibatches, epoch after epoch."""
    order = np.random.default_rng(derive_seed(stage.seed, stage.name, "minibatches", iteration))
    prompts = rows.alike_prompts()
    while True:
        yield np.array_split(shuffled(prompts, order), count)


def shuffled(groups: np.ndarray, order: np.random.Generator) -> np.ndarray:
    """The places of `groups` [B] in a random order in which those of one group follow one another.

    Replies to one prompt are trained in one minibatch where they fit, so that their prompt is computed once.
    """
    _, number = np.unique(groups, return_inverse=True)
    drawn = order.permutation(number.max() + 1)
    places: np.ndarray = np.argsort(np.argsort(drawn)[number], kind="stable")
    return places
