"""Advantage estimators: one table of the built-in ones, and the inputs of an estimator of your own.

Shapes: B replies, T response tokens of the longest one. An estimator is a function

    def mine(rollout: AdvantageInputs) -> Tensor:      # [B], or [B, T]

of the whole rollout, before it is split into minibatches. With a critic it may return (advantages, returns) instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xray_runtime.algorithms.advantages import gae
from xray_runtime.algorithms.groups import GroupBaseline, group_advantages
from xray_runtime.algorithms.streams import StreamError, TokenStreams, read


@dataclass(frozen=True)
class AdvantageInputs(TokenStreams):
    """One rollout; replies without a score are left out, and vote in no mean.

    What an estimator reads of the properties is computed, and nothing else.
    """

    scores: Tensor
    """[B] scaled score of each reply, minus the KL penalty of all its tokens where the penalty is in the reward."""
    rewards: Tensor
    """[B, T] the same by token: the penalty at each, rewards of single turns at the turn's end, the rest at the last
    valid token."""
    mask: Tensor
    """[B, T] bool: tokens that the policy chose."""
    groups: Tensor
    """[B] int64 from 0: replies with one number answer the same prompt."""
    values: Tensor
    """[B, T] the critic's value of the state before each token; 0 without a critic."""
    bootstrap_values: Tensor
    """[B] value of the state after the last token: 0, or with `truncated: bootstrap` the critic's where it was cut."""
    gamma: float
    gae_lambda: float
    """1 without a critic."""
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    """Name → values of what the properties read."""

    @property
    def seat_means(self) -> Tensor:
        """[B] float64: moving mean of the scores of each reply's seat in the rollouts before (`rewards.MovingMeans`);
        without seats, of all."""
        return read(self.streams, "seat_means")

    @property
    def sources(self) -> Tensor:
        """[B, S] raw score of each reply by each source of reward; NaN where the source does not apply."""
        return read(self.streams, "sources")

    @property
    def source_weights(self) -> Tensor:
        """[S] their weights."""
        return read(self.streams, "source_weights")


AdvantageEstimator = Callable[[AdvantageInputs], Tensor | tuple[Tensor, Tensor]]


def token_advantages(rollout: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """GAE over the critic's values; without a critic the rewards that are still to come (REINFORCE++, Hu 2025)."""
    return gae(
        rollout.rewards,
        rollout.values,
        rollout.mask,
        rollout.bootstrap_values,
        gamma=rollout.gamma,
        lam=rollout.gae_lambda,
    )


def _compared(baseline: GroupBaseline) -> AdvantageEstimator:
    return lambda rollout: group_advantages(rollout.scores, rollout.groups, baseline)


ESTIMATORS: Mapping[str, AdvantageEstimator] = {
    "gae": token_advantages,
    "reinforce++": token_advantages,
    "grpo": _compared("grpo"),
    "dr_grpo": _compared("dr_grpo"),
    "rloo": _compared("rloo"),
}


def estimate(estimator: AdvantageEstimator, rollout: AdvantageInputs, name: str) -> tuple[Tensor, Tensor]:
    """(advantages [B, T], returns [B, T]) in the dtype of `values`, 0 at masked tokens.

    A reply's advantage [B] counts for each of its tokens. Where the estimator gives no returns they are the advantages.
    `name` is the estimator's, for errors.

    Raises:
        ValueError: it returned something else than one or two tensors of these shapes, or a number that is not finite;
            or reads what is not there.
    """
    try:
        answer = estimator(rollout)
    except StreamError as error:
        raise StreamError(f"advantages: {name}: {error}") from None
    parts = answer if isinstance(answer, tuple) else (answer,)
    batch, mask = rollout.mask.shape[0], rollout.mask
    made = []
    for part in parts:
        if not isinstance(part, Tensor) or tuple(part.shape) not in ((batch,), tuple(mask.shape)) or len(parts) > 2:
            shown = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise ValueError(
                f"advantages: {name} returned {shown}: it must return a tensor [{batch}] or {list(mask.shape)}, or a "
                "pair of them, advantages and returns"
            )
        wide = part.detach().to(rollout.values.dtype)
        wide = wide[:, None].expand(mask.shape) if wide.dim() == 1 else wide
        wide = torch.where(mask.bool(), wide, 0.0)
        # Inputs that are not finite are refused elsewhere, by their own names.
        given = (rollout.scores, rollout.rewards, rollout.values, rollout.bootstrap_values)
        if not wide.isfinite().all() and all(column.isfinite().all() for column in given):
            raise ValueError(f"advantages: {name} returned {int((~wide.isfinite()).sum())} numbers that are not finite")
        made.append(wide)
    return made[0], made[-1]
