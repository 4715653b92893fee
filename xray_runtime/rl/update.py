"""The update of an iteration: several epochs of clipped minibatch steps on policy and critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xray_runtime.data.rows import Rows, alike_prompts, num_response_tokens, take
from xray_runtime.rl.agent_rows import BRANCHES, BranchRows
from xray_runtime.rl.types import Experience, to_rows
from xray_runtime.seeding import derive_seed
from xray_runtime.training.finite import SkippedSteps
from xray_runtime.training.schedule import lr_at
from xray_runtime.training.steps import PolicySums, StepStatistics, StepTotals, ValueSums, read_step
from xray_runtime.workers.protocols import ModelHandle, get_all

if TYPE_CHECKING:
    from xray_runtime.config.ppo import PPOConfig
    from xray_runtime.graph.inputs import PPOInputs
    from xray_runtime.graph.kind import Stage


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
    """Summary of an iteration's update."""

    steps: list[MinibatchStep]
    epochs: float
    stopped_early: bool
    """By `stop_kl`."""
    times_trained: np.ndarray
    """Number of optimizer steps on each row of the experience [B] int32."""


class Updater:
    """Trains the policy, and the critic where there is one, on experience.

    Args:
        skipped: counts the steps that models skip.
    """

    def __init__(
        self, stage: Stage[PPOConfig, PPOInputs], models: Mapping[str, ModelHandle], skipped: SkippedSteps
    ) -> None:
        self._stage, self._config, self._skipped = stage, stage.config, skipped
        self._policy, self._critic = models["policy"], models.get("critic")
        self._per_epoch = self._config.rollout_size // self._config.minibatch_size
        self._planned = self._config.iterations * self._config.epochs * self._per_epoch

    def update(self, experience: Experience, iteration: int, kl_coef: float) -> Update:
        """Run all epochs over an iteration's experience, or fewer if `stop_kl` is exceeded.

        Raises:
            RuntimeError: a model has more ranks than there are replies with a reward.
            NonFiniteError: a model skipped more steps than `max_skipped_steps`.
        """
        config, rows, count = self._config, to_rows(experience.rows), experience.num_rows
        num_minibatches, prompts = self._num_minibatches(count), alike_prompts(rows)
        order = np.random.default_rng(derive_seed(self._stage.seed, self._stage.name, "minibatches", iteration))
        steps: list[MinibatchStep] = []
        times_trained, stopped_early = np.zeros(count, np.int32), False
        for epoch in range(config.epochs):
            for number, index in enumerate(np.array_split(shuffled(prompts, order), num_minibatches)):
                at = (iteration * config.epochs + epoch) * self._per_epoch + number
                step = self._step(take(rows, index), at, kl_coef)
                steps.append(step)
                times_trained[index] += step.taken
                stopped_early = step.taken and self._moved_too_far(step)
                if stopped_early:
                    break
            if stopped_early:
                break
        return Update(steps, len(steps) / num_minibatches, stopped_early, times_trained)

    def _num_minibatches(self, num_replies: int) -> int:
        """Fewer minibatches than planned if few replies have a reward."""
        engines = (self._config.engine, self._config.critic_engine or self._config.engine)
        count = min(self._per_epoch, num_replies // max(engine.data_parallel for engine in engines))
        if not count:
            name = self._stage.name
            raise RuntimeError(
                f"{name}: only {num_replies} replies have a reward, fewer than the model's data-parallel ranks"
            )
        return count

    def _step(self, batch: Rows, at: int, kl_coef: float) -> MinibatchStep:
        batch = BranchRows.of(batch).rows if BRANCHES in batch else batch
        config, tokens = self._config, float(num_response_tokens(batch))
        totals = StepTotals(tokens=tokens, rows=len(batch["id"]), kl_coef=kl_coef).to_wire()
        at_once = (1 if self._critic is None else 2) + config.lag
        lr = lr_at(config, at, self._planned)
        calls = [self._policy.train.remote(batch, totals, lr, at_once)]
        if self._critic is not None:
            critic_lr = lr_at(config, at, self._planned, peak=config.critic_lr)
            calls.append(self._critic.train.remote(batch, totals, critic_lr, at_once))
        answers = get_all(calls)
        policy = read_step(PolicySums, answers[0])
        critic = read_step(ValueSums, answers[1]) if self._critic is not None else None
        # Each model steps or skips on its own, so both are counted.
        taken = self._skipped.check_step(self._stage, "policy", at, policy)
        if critic is not None:
            taken = self._skipped.check_step(self._stage, "critic", at, critic) and taken
        return MinibatchStep(tokens, lr, policy, critic, taken)

    def _moved_too_far(self, step: MinibatchStep) -> bool:
        limit = self._config.stop_kl
        return limit is not None and not step.policy.sums.approx_kl_sum / step.num_tokens <= limit  # NaN too


def shuffled(groups: np.ndarray, order: np.random.Generator) -> np.ndarray:
    """The places of `groups` [B] in a random order in which those of one group follow one another.

    Replies to one prompt are trained in one minibatch where they fit, so that their prompt is computed once.
    """
    _, number = np.unique(groups, return_inverse=True)
    drawn = order.permutation(number.max() + 1)
    places: np.ndarray = np.argsort(np.argsort(drawn)[number], kind="stable")
    return places
