"""AdamW as every trainer uses it: its parameter groups, the names of its states, and clipping before a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's two moments, as torch names them."""


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's parameter groups: norms and biases are not decayed, as is usual for transformers."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    # ZeRO-3 keeps the shape of a partitioned parameter in `ds_shape`.
    matrices = {p for p in trainable if len(getattr(p, "ds_shape", p.shape)) >= 2}
    groups = [
        {"params": [p for p in trainable if p in matrices], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p not in matrices], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float, norm: Tensor) -> None:
    """Torch's clipping of gradients, whose norm is `norm`, without its pass over those that are short enough: it would
    multiply them by 1."""
    if limit / (norm + 1e-6) < 1.0:
        clip_grads_with_norm_(parameters, limit, norm)
