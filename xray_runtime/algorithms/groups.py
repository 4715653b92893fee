"""Replies to one prompt compared with each other: advantages without a critic, and the best and worst of several.

A reply whose score failed is NaN. It gets an advantage of 0 and counts in no mean: the others are as if it was absent.
The best of n is a policy at most ln n − (n − 1)/n nats from the one that sampled (Beirami et al. 2024).

Shapes: B replies in any order, or P prompts with n replies each.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

GroupBaseline = Literal["grpo", "dr_grpo", "rloo"]
NONE = -1
"""Index for a group in which no reply has a reward."""


def group_advantages(rewards: Tensor, groups: Tensor, baseline: GroupBaseline) -> Tensor:
    """Each reply's advantage over its group, of n replies with a score, mean μ and sample deviation σ.

    `grpo`: (r − μ) / σ (Shao et al. 2024, DeepSeekMath); `dr_grpo`: r − μ (Liu et al. 2025, "Understanding R1-Zero-like
    training"); `rloo`: (r − μ) n / (n − 1), r minus the mean of the others (Ahmadian et al. 2024). A group of one, and
    one whose scores are all the same, teaches nothing: 0.

    Args:
        rewards: [B], NaN where there is none.
        groups: [B] int64, from 0: which replies belong together, in any order.

    Returns:
        [B] float64.
    """
    scored = ~rewards.isnan()
    r = torch.where(scored, rewards, 0.0).double()
    size = int(groups.max()) + 1 if len(groups) else 0

    def total(x: Tensor) -> Tensor:
        return torch.zeros(size, dtype=torch.float64, device=x.device).index_add_(0, groups, x.double())

    n = total(scored)
    deviation = torch.where(scored, r - group_means(rewards, groups), 0.0)
    # Rounding makes small differences of equal scores, which a division by their deviation would blow up.
    teaches = scored & ~tied_groups(rewards, groups)[groups]
    deviation = torch.where(teaches, deviation, 0.0)
    if baseline == "dr_grpo":
        return deviation
    if baseline == "rloo":
        return deviation * (n / (n - 1).clamp(min=1))[groups]
    sigma = (total(deviation.square()) / (n - 1).clamp(min=1)).sqrt()[groups]
    return torch.where(teaches, deviation / sigma, 0.0)


def group_means(rewards: Tensor, groups: Tensor) -> Tensor:
    """Each reply's mean of its group [B] float64, over replies with a score; 0 without any. Arguments as of
    `group_advantages`."""
    scored, size = ~rewards.isnan(), int(groups.max()) + 1 if len(groups) else 0
    zeros = torch.zeros(size, dtype=torch.float64, device=rewards.device)
    sums = zeros.index_add(0, groups, torch.where(scored, rewards, 0.0).double())
    return (sums / zeros.index_add(0, groups, scored.double()).clamp(min=1))[groups]


def tied_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """Which groups [G] teach nothing: fewer than two scores, or all the same. Arguments as of `group_advantages`."""
    size = int(groups.max()) + 1 if len(groups) else 0
    bound = rewards.new_full((size,), torch.inf)
    lowest = bound.scatter_reduce(0, groups, rewards.nan_to_num(nan=torch.inf), "amin")
    highest = (-bound).scatter_reduce(0, groups, rewards.nan_to_num(nan=-torch.inf), "amax")
    return lowest >= highest


def best_of(rewards: Tensor) -> Tensor:
    """Place of each group's highest reward [P] int64, from `rewards` [P, n]: the first if several are equal, `NONE` if
    none is finite."""
    valid = rewards.isfinite()
    places = rewards.masked_fill(~valid, -torch.inf).argmax(dim=1)
    return torch.where(valid.any(dim=1), places, NONE)


def worst_of(rewards: Tensor) -> Tensor:
    """Place of each group's lowest reward, as `best_of`."""
    return best_of(-rewards)


def tied(rewards: Tensor) -> Tensor:
    """Groups [P] in which no two replies differ in reward, also those with at most one."""
    valid = rewards.isfinite()
    highest = rewards.masked_fill(~valid, -torch.inf).amax(dim=1)
    lowest = rewards.masked_fill(~valid, torch.inf).amin(dim=1)
    return ~(highest > lowest)
