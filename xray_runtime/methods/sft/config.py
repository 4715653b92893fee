"""Supervised fine-tuning."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from xray_runtime.engines.training_config import TrainingConfig
from xray_runtime.kernel.config.section import Count, NonNegative, Positive, ValidationSchedule

REPLY_TOKENS = 512
"""The default limit of replies, for models whose context is at least three times as long."""


class SFTValidation(ValidationSchedule):
    """The loss on the conversations of `data.validation_fraction`, measured during training; the lowest is the best."""

    every: Count = 50
    """Steps between validations; one more follows the last step."""
    num_conversations: Count = 256


class SFTConfig(TrainingConfig):
    """Supervised fine-tuning on the assistant's tokens (other tokens carry no loss)."""

    lr: Positive = 2e-3
    steps: Count = 300
    """Optimizer steps."""
    batch_size: Count = 64
    """Conversations per optimizer step, over all Workhorses: a prompt and its reply, or with more context
    (`data.context_messages`) all replies whose prompts share a prefix."""
    max_response_tokens: Annotated[int, Field(ge=2)] | None = None
    """Replies with more tokens than this are dropped and counted; null: 512, or a third of the model's context if that
    is less."""
    weight_decay: NonNegative = 0.01
    validation: SFTValidation | None = None
    """None: publish the last version."""
