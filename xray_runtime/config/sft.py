"""Supervised fine-tuning."""

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

REPLY_TOKENS = 512
"""The longest reply where no field says so, of models whose context is three times as long."""


class SFTValidation(ValidationSchedule):
    """The loss on the conversations of `data.validation_fraction`, as the model is trained; the lowest is the best."""

    every: Count = 50
    """Steps from one look to the next; the last is after the last step."""
    num_conversations: Count = 256


class SFTConfig(TrainingConfig):
    """Supervised fine-tuning on what assistants said (other tokens carry no loss)."""

    lr: Positive = 2e-3
    steps: Count = 300
    """Optimizer steps."""
    batch_size: Count = 64
    """Conversations in one optimizer step, over all Workhorses: a prompt and its reply, or with more context
    (`data.context_messages`) all replies whose prompts begin alike."""
    max_response_tokens: Annotated[int, Field(ge=2)] | None = None
    """Replies with more tokens than this are dropped, and counted; null: 512, or a third of the model's context where
    that is less."""
    weight_decay: NonNegative = 0.01
    validation: SFTValidation | None = None
    """None: the stage ends with the last version."""

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        check_one_row_each(self.engine, "batch_size", self.batch_size)
        return self
