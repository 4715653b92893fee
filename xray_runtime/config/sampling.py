"""How replies are sampled that no ratio is taken of."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from xray_runtime.config.engines import Count, Positive, Section

Stop = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
"""Texts that end a reply, beside the tokens that end a turn; they stay in it."""


class SamplingConfig(Section):
    """Length, temperature, and which tokens are left to choose from."""

    max_new_tokens: Annotated[int, Field(ge=2)] = 16
    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Only the likeliest tokens that have this much probability together (Holtzman et al. 2019); 1: all."""
    top_k: Count | None = None
    """Only so many of the likeliest tokens; None: all."""
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Only tokens with at least this share of the likeliest one's probability (Nguyen et al. 2024)."""
    repetition_penalty: Positive = 1.0
    """Logits of tokens that prompt or reply hold already are divided by this where positive, multiplied where negative
    (Keskar et al. 2019)."""
    stop: Stop = Field(default_factory=list)
    """Texts that end a reply, beside the tokens that end a turn; they stay in it."""


BIASING = ("top_p", "top_k", "min_p", "repetition_penalty")
"""Fields under which replies come from another distribution than the one that log-probabilities are taken of."""
