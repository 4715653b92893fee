"""Several sampled replies per prompt; rewards choose among them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xray_runtime.config.engines import Count
from xray_runtime.config.ppo import JudgingConfig
from xray_runtime.config.sampling import SamplingConfig


class GroupsConfig(SamplingConfig, JudgingConfig):
    """How many replies are sampled, and how they are scored."""

    samples: Annotated[int, Field(ge=2)] = 8
    """Replies per prompt."""
    num_prompts: Count | None = None
    """Maximum number of prompts (None: all)."""
    truncated: Literal["drop", "keep"] = "drop"
    """Whether replies truncated at `max_new_tokens` may be chosen. A model trained on them learns to stop there."""


class BestOfNConfig(GroupsConfig):
    """The best of several sampled replies to each prompt, as data for SFT: rejection sampling (RAFT, Dong et al. 2023;
    Stiennon et al. 2020)."""

    min_reward: float | None = None
    """Drop prompts whose best reply has a lower reward: with a verifier's 0 and 1, those where no reply passes."""
    skip_tied: bool = False
    """Drop prompts whose replies all have the same reward."""
