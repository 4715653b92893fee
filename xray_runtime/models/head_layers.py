"""Output layers of a `HeadedLM` that a causal LM does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xray_runtime.models.family import Logits


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


@dataclass(frozen=True)
class ForwardInChunks:
    """An output layer's forward; with `compute` see `HeadedLM.in_chunks`."""

    layer: Callable[[Tensor], Tensor]
    logits: Logits

    def __call__(self, hidden: Tensor, compute: Callable[..., Any] | None = None) -> Any:
        # transformers calls the layer too, and does the rest by itself.
        return (
            self.layer(hidden) if compute is None else compute(lambda states: self.logits(self.layer(states)), hidden)
        )
