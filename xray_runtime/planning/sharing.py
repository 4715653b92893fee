"""The GPU of each rank where the models of a stage share GPUs (`runtime.gpus_per_workhorse` below 1).

Ray packs fractions: it would put two ranks of one model on one GPU, which NCCL refuses, and policy and generator on
different ones, which excludes CUDA IPC. So a stage reserves whole GPUs, and each takes at most one rank of a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

ROUNDING = 1e-6
"""A third of a GPU may be written as 0.333."""


class Ranks(Protocol):
    """The ranks of one model, which are on GPUs with consecutive numbers."""

    @property
    def role(self) -> str: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def gpus(self) -> float:
        """Share of a GPU for each rank."""

    @property
    def together(self) -> int:
        """Ranks of one tensor-parallel group."""


def shares_gpus(models: Sequence[Ranks]) -> bool:
    return any(0.0 < model.gpus < 1.0 for model in models)


def first_gpus(models: Sequence[Ranks]) -> tuple[Mapping[str, int], int]:
    """(role → number of its first GPU, number of GPUs), with as few GPUs as possible and their ranks spread evenly."""
    most = math.floor(1.0 / max(model.gpus for model in models) + ROUNDING)
    widest = max(_aligned(model.num_ranks, model) for model in models)
    used = [0] * max(widest, -(-sum(model.num_ranks for model in models) // most))
    first: dict[str, int] = {}
    for model in sorted(models, key=lambda m: m.num_ranks, reverse=True):
        size = model.num_ranks
        starts = range(0, len(used) + model.together, model.together)
        free = [start for start in starts if max(used[start : start + size], default=0) < most]
        # New GPUs last, then the emptiest.
        start = min(free, key=lambda s: (max(s + size - len(used), 0), max(used[s : s + size], default=0)))
        used += [0] * (start + size - len(used))
        first[model.role] = start
        for gpu in range(start, start + size):
            used[gpu] += 1
    return first, len(used)


def _aligned(number: int, model: Ranks) -> int:
    return -(-number // model.together) * model.together
