"""The reward-hacking monitor of a policy's training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xray_runtime.kernel.config.section import Count, Fraction, Positive, Section


class WatchConfig(Section):
    """Compares the last `window` iterations with the first ones; an alert beyond its bound triggers the `action`.

    Judges are the gold score and sources of reward of weight 0, which are not trained on.
    """

    action: Literal["off", "warn", "pause", "stop"] = "warn"
    """`warn`: summary and report show the alert. `pause`: the run waits for a person, who sees the alert and either
    continues or ends at a kept checkpoint; without anyone to decide it acts as `stop`. `stop`: the stage ends with the
    policy kept before the alert, and the checkpoint records it."""
    window: Count = 5
    """Number of iterations at the beginning and at the end to compare; also the distance of kept checkpoints."""
    reward_rise: Positive = 1.0
    """Judges are compared once a source of reward has risen by this many of its standard deviations…"""
    judge_share: Fraction = 0.25
    """… and must have risen by this share of it, in their own standard deviations and allowing for chance."""
    max_length_ratio: Annotated[float, Field(gt=1.0)] = 2.0
    """Factor by which replies may become longer or shorter."""
    min_distinct_ratio: Fraction = 0.5
    """Minimum share of distinct token pairs within a reply, relative to the first iterations."""
    common_phrase: Fraction = 0.5
    """Maximum share of replies that contain the same three tokens in a row."""
    max_kl_per_token: Positive = 1.0
    """Maximum KL to the reference, in nats per token. Small policies that learn well reach about 0.6."""
    min_router_entropy: Fraction = 0.7
    """Minimum entropy of the loads of a mixture's experts, relative to the first iterations."""
    max_disagreement_ratio: Annotated[float, Field(gt=1.0)] = 2.0
    """Factor by which the disagreement of an ensemble's members may grow."""
