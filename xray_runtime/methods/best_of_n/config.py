"""Several sampled replies per prompt; rewards choose among them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from xray_runtime.engines.sampling_config import SamplingConfig
from xray_runtime.kernel.config.section import Count
from xray_runtime.methods.common.environment import AgentConfig, check_turns
from xray_runtime.rewards.config import JudgingConfig


class GroupsConfig(SamplingConfig, JudgingConfig):
    """How many replies are sampled, and how they are scored."""

    samples: Annotated[int, Field(ge=2)] = 8
    """Replies per prompt."""
    num_prompts: Count | None = None
    """Maximum number of prompts (None: all)."""
    truncated: Literal["drop", "keep"] = "drop"
    """Whether replies truncated at `max_new_tokens` may be chosen. A model trained on them learns to stop there."""

    @property
    def replies_per_prompt(self) -> int:
        return self.samples

    @property
    def max_response_tokens(self) -> int:
        """Maximum number of tokens after a prompt."""
        return self.max_new_tokens


class BestOfNConfig(GroupsConfig):
    """The best of several sampled replies to each prompt, as data for SFT: rejection sampling (RAFT, Dong et al. 2023;
    Stiennon et al. 2020)."""

    environment: AgentConfig | None = None
    """An agent that calls the policy: of several episodes a prompt the best becomes data, a row for each call that is
    in the loss. None: single replies."""
    min_reward: float | None = None
    """Drop prompts whose best reply has a lower reward: with a verifier's 0 and 1, those where no reply passes."""
    skip_tied: bool = False
    """Drop prompts whose replies all have the same reward."""

    @property
    def max_response_tokens(self) -> int:
        return self.max_new_tokens if self.environment is None else self.environment.max_tokens

    @model_validator(mode="after")
    def _turns(self) -> Self:
        if self.environment is not None:
            check_turns(self.environment, self.max_new_tokens, self.stop)
        return self
