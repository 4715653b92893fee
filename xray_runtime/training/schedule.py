"""Learning rates from a stage's config."""

from __future__ import annotations

from xray_runtime.algorithms.schedules import learning_rate
from xray_runtime.config.engines import TrainingConfig


def lr_at(config: TrainingConfig, step: int, total: int, peak: float | None = None) -> float:
    """The learning rate of `config`'s schedule at `step` of `total`."""
    return learning_rate(
        step,
        total,
        peak=config.lr if peak is None else peak,
        schedule=config.schedule,
        warmup_fraction=config.warmup_fraction,
        final_lr_ratio=config.final_lr_ratio,
    )
