"""Where preference pairs come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xray_runtime.config.best_of_n import GroupsConfig
from xray_runtime.config.engines import (
    Fraction,
    GeneratorConfig,
    Positive,
    Section,
)
from xray_runtime.config.sampling import SamplingConfig
from xray_runtime.config.sources import GivenGold, Source


class GoldPreferences(SamplingConfig):
    """Two sampled replies to one prompt, labelled by a gold score through a Bradley–Terry draw."""

    source: Literal["gold"] = "gold"
    num_pairs: Annotated[int, Field(ge=8)] = 2000
    """Pairs to sample, training and held-out together."""
    sharpness: Positive = 4.0
    """P(first preferred) = sigmoid(sharpness × (gold(first) − gold(second))): labels are noisy, as people's are."""
    heldout_fraction: Fraction = 0.1
    """Share of prompts whose pairs only measure the reward model."""


class RatingPreferences(Section):
    """Pairs of replies ordered by the human ratings of their conversations, matched in length."""

    source: Literal["ratings"] = "ratings"
    num_pairs: Annotated[int, Field(ge=8)] = 2000
    rating: Literal["witty", "interesting", "upbeat"] = "upbeat"
    """Which of the human ratings (1 to 10) orders a pair."""
    min_gap: Annotated[int, Field(ge=1, le=9)] = 3
    """Smallest difference of ratings in a pair."""
    max_length_ratio: Annotated[float, Field(ge=1.0)] = 1.25
    """Longest reply over shortest reply of a pair, in words: length is controlled, since ratings mostly follow it."""
    heldout_fraction: Fraction = 0.1


class DatasetPreferences(Section):
    """Your own preference data: prompt/chosen/rejected, or HH-RLHF's chosen/rejected."""

    source: Literal["dataset"] = "dataset"
    path: Source
    """A .jsonl or .parquet file, a `datasets` name or directory, or what people judged: a checkpoint that
    `xray preferences` published, which becomes part of the lineage."""
    split: Annotated[str, Field(min_length=1)] = "train"
    max_pairs: Annotated[int, Field(ge=8)] | None = None
    heldout_fraction: Fraction = 0.1


PreferencesConfig = Annotated[GoldPreferences | RatingPreferences | DatasetPreferences, Field(discriminator="source")]


class JudgedPreferences(Section):
    """Human verdicts from `xray compare`: the input `judgements`."""

    source: Literal["judgements"] = "judgements"
    max_pairs: Annotated[int, Field(ge=8)] | None = None
    heldout_fraction: Fraction = 0.1


class SampledPreferences(GoldPreferences):
    """`GoldPreferences` with what samples and what labels."""

    gold: GivenGold
    generator: GeneratorConfig = GeneratorConfig()


class _Rewards(Section):
    source: Literal["rewards"] = "rewards"
    heldout_fraction: Fraction = 0.1


class RewardedPreferences(GroupsConfig, _Rewards):
    """The best and the worst of several sampled replies to each prompt, by the stage's `rewards`: pairs of the policy's
    own, for online DPO."""


PreferencesStageConfig = Annotated[
    SampledPreferences | RatingPreferences | DatasetPreferences | JudgedPreferences | RewardedPreferences,
    Field(discriminator="source"),
]
"""All that the stage kind `preferences` reads."""


class SplitPreferencesConfig(Section):
    """One of two parts of preference pairs that share no prompt."""

    part: Literal["training", "heldout"]
    heldout: Fraction = 0.5
    """Share of the prompts whose pairs are `heldout`, for a reward model that judges."""
