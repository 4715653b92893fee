"""The config of a model that judges at an OpenAI-compatible address."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from xray_runtime.kernel.config.section import Count, NonNegative
from xray_runtime.kernel.config.sources import Address
from xray_runtime.rewards.kinds._remote import RemoteConfig
from xray_runtime.rewards.term import Column


class JudgeConfig(RemoteConfig):
    """A model at an OpenAI-compatible address scores each reply by a rubric, or compares replies."""

    url: Address
    """Its address up to `/v1`: `http://localhost:8000/v1`."""
    model: Annotated[str, Field(min_length=1)]
    rubric: Annotated[str, Field(min_length=1)]
    """Description of a good reply."""
    scale: Annotated[tuple[float, float], Field(strict=False)] = (1.0, 10.0)
    """The worst and the best score. A score outside them is a failed score."""
    opponents: Count | None = None
    """Compare each reply with at least this many others to the same prompt, in both orders, instead of scoring it by
    itself: its score is its win rate, from 0 to 1. Each prompt then needs several replies."""
    column: Column | None = None
    """Column with a reference answer to show to the judge."""
    max_tokens: Count = 512
    temperature: NonNegative = 0.0

    @model_validator(mode="after")
    def _one_scale(self) -> Self:
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale = {list(self.scale)} must ascend")
        if self.opponents is not None and self.scale != JudgeConfig.model_fields["scale"].default:
            raise ValueError(f"scale must be left out with opponents = {self.opponents}: a win rate is from 0 to 1")
        return self
