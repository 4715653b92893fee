"""The reward model."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from xray_runtime.config.engines import (
    Count,
    NonNegative,
    Positive,
    TrainingConfig,
    check_one_row_each,
)


class RewardConfig(TrainingConfig):
    """A pairwise Bradley–Terry reward model on the SFT model."""

    lr: Positive = 1e-3
    epochs: Count = 2
    batch_size: Count = 64
    """Pairs in one optimizer step, over all Workhorses."""
    weight_decay: NonNegative = 0.01

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        check_one_row_each(self.engine, "batch_size", self.batch_size)
        return self
