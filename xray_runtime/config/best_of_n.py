"""Several replies to each prompt, of which rewards choose."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xray_runtime.config.engines import Count
from xray_runtime.config.ppo import JudgingConfig
from xray_runtime.config.sampling import SamplingConfig


class GroupsConfig(SamplingConfig, JudgingConfig):
    """How many replies are sampled, and how they are scored."""

    samples: Annotated[int, Field(ge=2)] = 8
    """Replies to each prompt."""
    num_prompts: Count | None = None
    """Prompts that are asked, at most (None: all)."""
    truncated: Literal["drop", "keep"] = "drop"
    """Whether replies cut off at `max_new_tokens` may be chosen: trained on, they would seem to end there."""


class BestOfNConfig(GroupsConfig):
    """The best of several sampled replies to each prompt, as data for SFT: rejection sampling (RAFT, Dong et al. 2023;
    Stiennon et al. 2020)."""

    min_reward: float | None = None
    """A prompt is left out where its best reply's reward is lower: with a verifier's 0 and 1, where none passes."""
    skip_tied: bool = False
    """Leave out prompts whose replies all have one reward: the best is then as good as any."""
