"""Sources of preference pairs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sampling_config import SamplingConfig
from xray_runtime.kernel.config.section import Fraction, Positive, Section
from xray_runtime.kernel.config.sources import ColumnNames, GivenGold, Source
from xray_runtime.methods.best_of_n.config import GroupsConfig
from xray_runtime.rewards.config import GoldConfig


class GoldPreferences(SamplingConfig):
    """Two sampled replies per prompt, labelled by a Bradley–Terry draw from their gold scores."""

    source: Literal["gold"] = "gold"
    num_pairs: Annotated[int, Field(ge=8)] = 2000
    """Pairs to sample, training and held-out together."""
    sharpness: Positive = 4.0
    """P(first preferred) = sigmoid(sharpness × (gold(first) − gold(second))): labels are noisy, like human labels."""
    heldout_fraction: Fraction = 0.1
    """Share of prompts whose pairs are held out to measure the reward model."""


class RatingPreferences(Section):
    """Pairs of replies ordered by the human ratings of their conversations, matched in length."""

    source: Literal["ratings"] = "ratings"
    num_pairs: Annotated[int, Field(ge=8)] = 2000
    rating: Literal["witty", "interesting", "upbeat"] = "upbeat"
    """The human rating (1 to 10) that orders a pair."""
    min_gap: Annotated[int, Field(ge=1, le=9)] = 3
    """Minimum difference of ratings in a pair."""
    max_length_ratio: Annotated[float, Field(ge=1.0)] = 1.25
    """Maximum ratio of the reply lengths in a pair, in words. Length is controlled because it drives most ratings."""
    heldout_fraction: Fraction = 0.1


class DatasetPreferences(Section):
    """Your own preference data: prompt/chosen/rejected, or HH-RLHF's chosen/rejected."""

    source: Literal["dataset"] = "dataset"
    path: Source
    """A .jsonl, .json or .parquet file, a `datasets` name or directory, or a checkpoint that `xray preferences`
    published, which becomes part of the lineage."""
    split: Annotated[str, Field(min_length=1)] = "train"
    pictures: Source | None = None
    """See `data.pictures`."""
    rename_columns: ColumnNames = Field(default_factory=dict)
    """Name of a column in `path` → the name that X-ray reads: `{question: prompt}`."""
    max_pairs: Annotated[int, Field(ge=8)] | None = None
    heldout_fraction: Fraction = 0.1


PreferencesConfig = Annotated[GoldPreferences | RatingPreferences | DatasetPreferences, Field(discriminator="source")]


class JudgedPreferences(Section):
    """Human verdicts from `xray compare`: the input `judgements`."""

    source: Literal["judgements"] = "judgements"
    max_pairs: Annotated[int, Field(ge=8)] | None = None
    heldout_fraction: Fraction = 0.1


class CuratedPreferences(Section):
    """Pairs that `curate` made, with its held-out users and conversations: the input `judgements`."""

    source: Literal["curated"] = "curated"


class SampledPreferences(GoldPreferences, GoldConfig):
    """`GoldPreferences` with the generator and the gold score."""

    gold: GivenGold
    generator: GeneratorConfig = GeneratorConfig()


class _Rewards(Section):
    source: Literal["rewards"] = "rewards"
    heldout_fraction: Fraction = 0.1


class RewardedPreferences(GroupsConfig, _Rewards):
    """The best and the worst of several sampled replies per prompt, by the stage's `rewards`: pairs of the policy's own
    replies, for online DPO."""


PreferencesStageConfig = Annotated[
    SampledPreferences
    | RatingPreferences
    | DatasetPreferences
    | JudgedPreferences
    | CuratedPreferences
    | RewardedPreferences,
    Field(discriminator="source"),
]
"""All fields of the stage kind `preferences`."""


class SplitPreferencesConfig(Section):
    """A split of preference pairs in two parts that share no prompt."""

    part: Literal["training", "heldout"]
    heldout: Fraction = 0.5
    """Share of the prompts whose pairs go to `heldout`, for a reward model that acts as a judge."""
