"""Evaluation and the gates that read it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from xray_runtime.config.engines import (
    NonNegative,
    Positive,
    Section,
    UnitInterval,
)
from xray_runtime.config.ppo import JudgingConfig
from xray_runtime.config.sampling import SamplingConfig


class EvaluateConfig(SamplingConfig):
    """The tuned policy against the SFT model on held-out prompts."""

    num_prompts: Annotated[int, Field(ge=8)] = 256
    bootstrap_samples: Annotated[int, Field(ge=100)] = 2000
    """Resamples behind the 95% intervals."""
    num_samples_shown: Annotated[int, Field(ge=1, le=200)] = 24
    """Sample pairs in the report's table."""


class EvaluationConfig(EvaluateConfig, JudgingConfig):
    """All that the stage kinds `evaluate` and `compare` read."""


class PromotionConfig(Section):
    """The gates between `candidate` and `champion`; None turns one off. No stage reads them, so no result changes."""

    min_win_rate: UnitInterval | None = 0.5
    """The lower end of the win rate's 95% interval, over the SFT model."""
    max_kl: Positive | None = 20.0
    """Nats a reply, to the SFT model."""
    max_length_ratio: Annotated[float, Field(ge=1.0)] | None = 2.0
    """Length of replies after to before, and before to after."""
    max_gold_drop: NonNegative | None = 0.0
    """While the learned reward rises, the gold score may fall by no more: it is a sign of reward hacking."""
    max_regression: Annotated[float, Field(ge=0.0, le=0.5)] | None = 0.1
    """The lower end of the 95% interval of the win rate over the present champion, on the same held-out prompts with
    the same seeds, may be this far below one half."""
    allowed_licenses: list[Annotated[str, Field(min_length=1)]] | None = None
    """Everything that the candidate, or what rewarded it, was made from has one of these licences; None: not asked."""
