"""Sampling of replies that need no policy ratio."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from xray_runtime.kernel.config.section import Count, Positive, Section

LARGEST_SET = 128
"""Most tokens that are left to sample from where the set is recorded, but for equals of the last one."""
MOST_REPORTED = 2 * LARGEST_SET
"""Most tokens that an engine reports at each place of a reply. More than a kept set: logits that equal its last are
kept, too."""

Stop = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
"""Texts that end a reply, beside the tokens that end a turn; they stay in it."""


class SamplingConfig(Section):
    """Length, temperature and truncation of the distribution."""

    max_new_tokens: Annotated[int, Field(ge=2)] = 16
    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the likeliest tokens that together have this probability (Holtzman et al. 2019); 1: all."""
    top_k: Count | None = None
    """Sample from this many of the likeliest tokens; None: all."""
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Sample from tokens with at least this share of the likeliest token's probability (Nguyen et al. 2024)."""
    repetition_penalty: Positive = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens that already occur in prompt or reply (Keskar et
    al. 2019)."""
    stop: Stop = Field(default_factory=list)
    """Texts that end a reply, beside the tokens that end a turn; they stay in it."""
