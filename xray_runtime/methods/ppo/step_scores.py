"""Old log-probabilities from the first step itself, where nothing before it needs them.

The first minibatch of an update would be scored by the policy, and then computed again, with gradients, by the step.
Here the step takes its own: a wrapper of the objective fills the columns that a batch lacks, and gives them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from xray_runtime.algorithms.importance import flat_importance_weights
from xray_runtime.data.batch import Scores
from xray_runtime.methods.ppo.objectives import PolicyForward, PPOObjective
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Component, Objective, Texts, of_responses


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
