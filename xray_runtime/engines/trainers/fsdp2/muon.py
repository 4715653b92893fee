"""Muon (Jordan et al. 2024): momentum whose matrix is orthogonalized, for matrices of which each rank holds rows.

    m ← β·m + (1 − β)·g                                    momentum
    u = Orth((1 − β)·g + β·m)                              Nesterov's look ahead
    W ← (1 − lr·λ)·W − 0.2·√max(rows, columns)·lr·u        Liu et al. 2025, "Muon is Scalable": AdamW's step size

Orth maps the singular values to about 1, by five Newton–Schulz iterations of the whole matrix: of rows alone it would
be another matrix. So of as many matrices as there are ranks each rank gathers one, orthogonalizes it and scatters its
rows again. Deviation from Jordan's code: the iterations are in float32, not bfloat16, so that a layout hardly shows in
what is learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The quintic a·x + b·x³ + c·x⁵, whose iterations take singular values from (0, 1] to about [0.7, 1.2]."""
NUM_ITERATIONS = 5
SMALLEST_NORM = 1e-7
MOMENTUM = "momentum_buffer"


def orthogonalized(matrix: Tensor) -> Tensor:
    """U·p(S)·Vᵀ of a float matrix [M, N] with the singular value decomposition U·S·Vᵀ, where p(S) is about 1; zeros of
    zeros."""
    a, b, c = COEFFICIENTS
    # The smaller Gram matrix.
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    made: Tensor = x.mT if matrix.shape[0] > matrix.shape[1] else x
    return made


class Muon(torch.optim.Optimizer):
    """Args:
    rows: this rank's rows [m, N] of each matrix; ranks share them as `torch.chunk`.
    heights: number of rows M of each whole matrix.
    """

    def __init__(
        self, rows: Sequence[nn.Parameter], heights: Sequence[int], lr: float, weight_decay: float, momentum: float
    ) -> None:
        super().__init__(rows, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._heights = heights
        for part in rows:
            self.state[part][MOMENTUM] = torch.zeros_like(part)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """A step with the gradients of all matrices; every rank makes it."""
        assert closure is None
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            parts: list[Any] = group["params"]
            for first in range(0, len(parts), num_ranks):
                owned = list(enumerate(zip(parts, self._heights, strict=True)))[first : first + num_ranks]
                whole: Tensor | None = None
                for owner, (_, (part, height)) in enumerate(owned):
                    gathered = _gather(self._direction(part, group["momentum"]), height, owner)
                    whole = gathered if owner == rank else whole
                if whole is not None:
                    whole = orthogonalized(whole)
                for owner, (_, (part, height)) in enumerate(owned):
                    update = _scatter(whole if owner == rank else None, part, height, owner)
                    scale = 0.2 * max(height, part.shape[1]) ** 0.5
                    part.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)

    def _direction(self, part: nn.Parameter, momentum: float) -> Tensor:
        held: Tensor = self.state[part][MOMENTUM]
        assert part.grad is not None
        held.lerp_(part.grad, 1.0 - momentum)
        return part.grad.lerp(held, momentum)


def _gather(rows: Tensor, height: int, owner: int) -> Tensor | None:
    """The whole matrix on rank `owner`, from the rows of all; None on others."""
    num_ranks = dist.get_world_size()
    chunk = -(-height // num_ranks)
    padded = nn.functional.pad(rows, (0, 0, 0, chunk - len(rows)))
    parts = [torch.empty_like(padded) for _ in range(num_ranks)] if dist.get_rank() == owner else None
    dist.gather(padded, parts, dst=owner)
    return None if parts is None else torch.cat(parts)[:height]


def _scatter(whole: Tensor | None, rows: Tensor, height: int, owner: int) -> Tensor:
    """Each rank's rows, as `rows`, of the matrix that `owner` has whole."""
    num_ranks = dist.get_world_size()
    chunk = -(-height // num_ranks)
    mine, parts = rows.new_empty((chunk, rows.shape[1])), None
    if whole is not None:
        padded = nn.functional.pad(whole, (0, 0, 0, chunk * num_ranks - height))
        parts = [part.contiguous() for part in padded.split(chunk)]
    dist.scatter(mine, parts, src=owner)
    return mine[: len(rows)]
