"""The best and the worst of several replies to one prompt. Shapes: P prompts, n replies each.

The best of n is a policy at most ln n − (n − 1)/n nats from the one that sampled (Beirami et al. 2024). A reply whose
reward is no finite number, because its score failed or it must not count, neither wins nor loses.
"""

from __future__ import annotations

import torch
from torch import Tensor

NONE = -1
"""Index for a group in which no reply has a reward."""


def best_of(rewards: Tensor) -> Tensor:
    """Place of each group's highest reward [P] int64, from `rewards` [P, n]: the first if several are equal, `NONE` if
    there is no reward."""
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
