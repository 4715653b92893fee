"""The loss of a reward model, as a sum over pairs."""

from __future__ import annotations

import torch
from torch import Tensor


def pairwise_loss(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    """Bradley–Terry: (sum of −log σ(chosen − rejected), number of pairs in the right order, ties half)."""
    margin = chosen - rejected
    correct = ((margin > 0).to(margin.dtype) + 0.5 * (margin == 0)).sum().detach()
    return -torch.nn.functional.logsigmoid(margin).sum(), correct
