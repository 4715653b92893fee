"""The loss of a reward model."""

from __future__ import annotations

import torch
from torch import Tensor

from xray_runtime.algorithms.statistics import wins


def pairwise_losses(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    """Bradley–Terry: (−log σ(chosen − rejected) of each pair [P], number of pairs in the right order, ties half)."""
    return -torch.nn.functional.logsigmoid(chosen - rejected), wins(chosen, rejected).sum()
