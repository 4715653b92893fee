"""Tokens of a whole rollout that a loss treats in a way of its own, chosen before any split into minibatches.

A loss sees a micro-batch and could not compare its tokens with the others. It reads the choice as a stream
(`PolicyLossInputs.chosen`), so that the split does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RolloutTokens:
    """The tokens of a rollout, [B, T] each."""

    logprobs: Tensor
    """The policy's, before the update."""
    advantages: Tensor
    mask: Tensor
    """bool: tokens that the policy chose."""
    seeds: Sequence[int] = ()
    """One a reply [B]."""

    def draws(self) -> Tensor:
        """Uniform in [0, 1), float64; a token's depends on its reply's seed and its place alone."""
        width = self.mask.shape[1]
        rows = [torch.rand(width, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in self.seeds]
        return torch.stack(rows)


TokenChoice = Callable[[RolloutTokens], Tensor]
"""bool [B, T]: the chosen tokens."""


def covariances(tokens: RolloutTokens) -> Tensor:
    """(log π − mean log π) (A − mean A) of each token, with means over all that count; 0 at the others [B, T] float64.

    Their mean is what a step of the policy gradient takes from the entropy, to first order (Cui et al. 2025).
    """
    mask = tokens.mask.bool()

    def centred(values: Tensor) -> Tensor:
        values = values.double().where(mask, 0.0)
        return (values - values.sum() / mask.sum().clamp(min=1)).where(mask, 0.0)

    return centred(tokens.logprobs) * centred(tokens.advantages)


def first_of(order: Tensor, allowed: Tensor, count: int) -> Tensor:
    """Which of the `allowed` are the `count` first by `order`, both [B, T]; equal ones go together, so that no order
    of rows shows."""
    found = order[allowed]
    if not count or not len(found):
        return torch.zeros_like(allowed)
    return allowed & (order <= found.sort().values[min(count, len(found)) - 1])
