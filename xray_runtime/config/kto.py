"""Learning from replies that are desirable or not, each by itself: KTO."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from xray_runtime.config.engines import (
    Count,
    NonNegative,
    Positive,
    TrainingConfig,
    ValidationSchedule,
    check_one_row_each,
)


class KTOValidation(ValidationSchedule):
    """The loss on replies that are left out of training, while the policy is trained; the lowest is the best."""

    num_replies: Annotated[int, Field(ge=2)] = 128
    """Replies that are left out, about: those to a prompt are left out together, drawn by the seed."""


class KTOConfig(TrainingConfig):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024)."""

    beta: Positive = 0.1
    """Factor of the log-ratios: the larger it is, the nearer the policy stays to the reference."""
    desirable_weight: NonNegative = 1.0
    """λ of desirable replies. Where there are fewer of one sort, its weight times its number should be from 1 to 4/3 of
    the other's."""
    undesirable_weight: NonNegative = 1.0
    """λ of the others."""
    lr: Positive = 2e-4
    epochs: Count = 1
    batch_size: Annotated[int, Field(ge=2)] = 64
    """Replies in one optimizer step, over all Workhorses."""
    validation: KTOValidation | None = None
    """None: all replies are trained on, and the stage ends with the last version."""

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if not self.desirable_weight and not self.undesirable_weight:
            raise ValueError("undesirable_weight = 0.0 must be above 0 with desirable_weight = 0.0: nothing is learned")
        check_one_row_each(self.engine, "batch_size", self.batch_size)
        return self
