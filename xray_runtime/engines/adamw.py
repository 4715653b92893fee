"""AdamW as every trainer uses it: its parameter groups and the names of its states."""

from __future__ import annotations

from typing import Any

from torch import nn

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
