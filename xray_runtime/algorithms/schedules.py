"""Learning rates as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from typing import Literal, Protocol


class Schedule(Protocol):
    """The schedule of a `TrainingConfig`."""

    lr: float
    schedule: Literal["constant", "linear", "cosine"]
    warmup_fraction: float
    final_lr_ratio: float


def learning_rate(config: Schedule, step: int, total_steps: int, peak: float | None = None) -> float:
    """Learning rate of step `step` (from 0) of `total_steps` on the config's schedule; `peak` replaces `config.lr`.

    Rises linearly over the first `warmup_fraction` of the steps (step 0 already has a share of the peak), then stays,
    or falls to `peak · final_lr_ratio` at the last step.
    """
    peak = config.lr if peak is None else peak
    warmup = round(total_steps * config.warmup_fraction)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return peak
    progress = min((step - warmup) / max(total_steps - 1 - warmup, 1), 1.0)
    shape = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (config.final_lr_ratio + (1.0 - config.final_lr_ratio) * shape)
