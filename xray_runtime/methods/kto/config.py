"""KTO: learning from single replies that are labelled desirable or undesirable."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from xray_runtime.engines.training_config import TrainingConfig
from xray_runtime.kernel.config.section import Count, NonNegative, Positive, ValidationSchedule


class KTOValidation(ValidationSchedule):
    """The loss on replies kept out of training, measured during training; the lowest is the best."""

    num_replies: Annotated[int, Field(ge=2)] = 128
    """Approximate number of replies to keep out of training. All replies to a prompt are kept out together; `seed`
    draws the prompts."""


class KTOConfig(TrainingConfig):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024)."""

    beta: Positive = 0.1
    """Factor of the log-ratios. Larger values keep the policy closer to the reference."""
    desirable_weight: NonNegative = 1.0
    """λ of desirable replies. If one label is rarer, its weight times its count should be 1 to 4/3 of the other's."""
    undesirable_weight: NonNegative = 1.0
    """λ of undesirable replies."""
    lr: Positive = 2e-4
    epochs: Count = 1
    batch_size: Annotated[int, Field(ge=2)] = 64
    """Replies per optimizer step, over all Workhorses."""
    validation: KTOValidation | None = None
    """None: train on all replies and publish the last version."""

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if not self.desirable_weight and not self.undesirable_weight:
            raise ValueError(
                "undesirable_weight = 0.0 must be above 0 with desirable_weight = 0.0: the policy would not learn"
            )
        return self
