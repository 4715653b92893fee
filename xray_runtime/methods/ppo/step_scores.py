"""Old log-probabilities from the first step itself, where nothing before it needs them.

The first minibatch of an update would be scored by the policy, and then computed again, with gradients, by the step.
Here the step takes its own: the policy scores only the other rows, and a wrapper of the objective fills the columns
that the first minibatch lacks and gives them back. `body` registers it; without it the policy scores all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from xray_runtime.algorithms.importance import flat_importance_weights
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.protocols import ModelHandle, get
from xray_runtime.data.batch import PolicyBatch, Scores, TextBatch
from xray_runtime.data.ragged import Ragged, join_ragged
from xray_runtime.methods.ppo.experience import Experience, measured
from xray_runtime.methods.ppo.models import Specs
from xray_runtime.methods.ppo.objectives import PolicyForward, PPOObjective
from xray_runtime.methods.ppo.update import minibatches
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Component, Objective, Texts, of_responses

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.methods.common.inputs import PPOInputs
    from xray_runtime.methods.ppo.config import PPOConfig


def applies(config: PPOConfig) -> bool:
    """Whether nothing before an update needs the policy's log-probabilities. A KL in the reward does, and a value head
    or frozen layers have other scores from the same pass."""
    in_reward = config.kl.place == "reward" and config.kl.coef > 0
    return not in_reward and config.critic_in_use != "shared" and config.trainable_layers is None


class StepScoring:
    """An `update.FirstStep` that scores its own rows."""

    def __init__(self, stage: Stage[PPOConfig, PPOInputs]) -> None:
        self._stage, self._config = stage, stage.config

    def specs(self, specs: Specs) -> Specs:
        """The models, with a policy that scores rows in a step."""
        policy = specs["policy"]
        assert isinstance(policy, ModelSpec)
        assert isinstance(policy.objective, PPOObjective)
        return specs | {"policy": replace(policy, objective=StepScored(policy.objective))}

    def scored_before(self, rows: TextBatch, iteration: int) -> np.ndarray:
        """Those outside the first minibatch, as it is if all get a reward; all, if tied groups may be replaced before
        the rollout is split into minibatches."""
        config = self._config
        count = config.rollout_size // config.minibatch_size
        if count > 1 and config.resample_rounds:
            return np.arange(len(rows))
        return np.setdiff1d(np.arange(len(rows)), next(minibatches(self._stage, rows, count, iteration))[0])

    def rows(self, policy: ModelHandle, experience: Experience, index: np.ndarray) -> tuple[Experience, PolicyBatch]:
        """Replies without a reward, which are left out, move others to other minibatches than were expected: rows
        outside the first one that lack scores are scored now."""
        later = np.setdiff1d(np.arange(experience.num_rows), index)
        others, own = experience.rows.take(later), experience.rows.take(index)
        if _unscored(others):
            text = TextBatch.of_columns(others.pick("input_ids", "prompt_lengths", "id"))
            answer = get(policy.score.remote(text, 1 + bool(self._config.lag)))
            experience = measured(self._config, experience, _replaced(experience, later, answer.logprobs))
        unread = ("old_logprobs", "weights") if _unscored(own) else ("rollout_logprobs",)
        return experience, own.with_columns(**dict.fromkeys(unread))

    def learned(self, experience: Experience, index: np.ndarray, columns: Scores) -> Experience:
        if "old_logprobs" not in columns:
            return experience
        return measured(self._config, experience, _replaced(experience, index, columns.old_logprobs))


def _unscored(rows: PolicyBatch) -> bool:
    """Whether some rows lack the policy's log-probabilities."""
    return bool((rows.old_logprobs.lengths < rows.rollout_logprobs.lengths).any())


def _replaced(experience: Experience, places: np.ndarray, by: Ragged) -> Ragged:
    """The experience's `old_logprobs` with `by` at `places`."""
    others = np.setdiff1d(np.arange(experience.num_rows), places)
    kept = experience.rows.old_logprobs[others]
    return join_ragged([kept, by], [others.tolist(), places.tolist()])


@dataclass(frozen=True)
class StepScored(Objective[PolicyForward]):
    """`policy` whose rows may lack `old_logprobs` and `weights`: those of a rollout's first step. The pass computes
    them itself, weights from `rollout_logprobs`, and gives `old_logprobs` back."""

    policy: PPOObjective

    def components(self, module: HeadedLM) -> Sequence[Component[PolicyForward]]:
        return self.policy.components(module)

    def score(self, module: HeadedLM, rows: Texts) -> Scores[Tensor]:
        return self.policy.score(module, rows)

    def forward(self, module: HeadedLM, rows: Any) -> PolicyForward:
        forward, config = self.policy.forward(module, rows), self.policy.config
        if "old_logprobs" not in rows:
            old = forward.logprobs.detach()
            weights = flat_importance_weights(
                old,
                rows.rollout_logprobs.values,
                forward.mask,
                forward.replies,
                mode=config.importance_correction,
                cap=config.importance_cap,
                level=config.importance_level,
            )
            forward.columns = Scores(old_logprobs=of_responses(old, rows))
            forward.rows = rows.with_columns(weights=of_responses(weights, rows), **forward.columns.columns())
        return forward
