"""The loss of a reward model, as a sum over pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from xray_runtime.algorithms.statistics import wins


def pairwise_loss(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    """Bradley–Terry: (sum of −log σ(chosen − rejected), number of pairs in the right order, ties half)."""
    margin = chosen - rejected
    return -torch.nn.functional.logsigmoid(margin).sum(), wins(chosen, rejected).sum()
