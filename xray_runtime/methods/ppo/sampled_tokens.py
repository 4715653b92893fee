"""Fields of a `ppo` stage about the distribution that its replies are sampled from, where it is not the policy's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from xray_runtime.engines.sampling_config import LARGEST_SET, MOST_REPORTED
from xray_runtime.kernel.config.section import Section


class SampledTokensConfig(Section):
    """The part of the vocabulary to sample from, and what a rollout says of the tokens that could have been."""

    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the likeliest tokens that together have this probability; 1: all. The policy's and the reference's
    log-probabilities are then those on the set of tokens that were left at each place, which the ledger keeps. So are
    they with `top_k` and `min_p`."""
    top_k: Annotated[int, Field(ge=1, le=LARGEST_SET)] | None = None
    """Sample from this many of the likeliest tokens. None: all, or with `top_p` or `min_p` the 128 likeliest."""
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Sample from tokens with at least this share of the likeliest token's probability."""
    importance_correction: Literal["truncate", "mask", "none"] = "truncate"
    """Importance weights for the difference between the generator's and the trainer's log-probabilities, with `lag`
    also for its updates: `truncate` caps them at `importance_cap`, `mask` drops tokens beyond it or below
    `importance_floor`, `none` ignores the difference. It must be `none` where the loss reads `rollout_logprobs` instead
    of `old_logprobs`, which corrects by itself."""
    importance_cap: Annotated[float, Field(gt=1.0)] = 2.0
    importance_floor: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """With `mask`: tokens with a smaller weight are dropped."""
    importance_level: Literal["token", "reply"] = "token"
    """`reply`: one weight for all tokens of a reply, the geometric mean of the token weights."""
    score_centering: bool = False
    """Take from the loss what moves the policy by the mismatch alone, found from the sampler's `top_logprobs` likeliest
    tokens (2026, arXiv 2609.20807), with the weights of `importance_correction`. For samplers that are not the policy:
    in another precision, or with `lag`."""
    top_logprobs: Annotated[int, Field(ge=1, le=MOST_REPORTED)] = 20
    """How many of the sampler's likeliest tokens rollout and ledger have at each place; only where `score_centering` or
    the loss reads them."""

    @model_validator(mode="before")
    @classmethod
    def _no_penalty(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and "repetition_penalty" in given:
            raise ValueError(
                f"repetition_penalty = {given['repetition_penalty']!r} is not allowed: the policy's log-probabilities "
                "have none, and ratios to replies sampled with one would be biased"
            )
        return given

    @property
    def cuts(self) -> str:
        """The fields that leave a part of the vocabulary to sample from; empty: none does."""
        neutral = {"top_p": 1.0, "top_k": None, "min_p": 0.0}
        given = {name: getattr(self, name) for name in neutral}
        return ", ".join(f"{name} = {value}" for name, value in given.items() if value != neutral[name])
