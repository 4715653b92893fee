"""Output layers of a `HeadedLM` that a causal LM does not have."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ScalarHead(nn.Linear):
    """One number a state, in float32 at least: the eight bits of bfloat16 would round values and rewards coarsely."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Numbers [..., 1] of hidden states [..., H]."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return nn.functional.linear(hidden.to(dtype), self.weight.to(dtype), self.bias.to(dtype))


class BorrowedHead(nn.Module):
    """An output layer [V, H] whose weight another pipeline stage owns: no parameter of this one, with a gradient.

    In mixed precision it stays float32, and so does its gradient, which is summed over micro-batches here.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight.detach().clone().requires_grad_()

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, H]."""
        return nn.functional.linear(hidden, self.weight.to(hidden.dtype))
