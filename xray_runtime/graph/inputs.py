"""What each stage kind takes: fields are roles, their types what may play them."""

from __future__ import annotations

from dataclasses import dataclass, field

from xray_runtime.graph.artifacts import Artifact, Dataset, Judgements, Model, Preferences, RewardModel


@dataclass(frozen=True)
class FreshBaseInputs:
    data: Dataset


@dataclass(frozen=True)
class SFTInputs:
    base: Model
    data: Dataset


@dataclass(frozen=True)
class PreferencesInputs:
    policy: Model | None = None
    """Whose replies are labelled, with `source: gold` and `source: rewards`."""
    data: Dataset | None = None
    """Whose prompts are asked; prompts it holds out for evaluation are left out of other sources' pairs."""
    judgements: Judgements | None = None
    rewards: list[RewardModel] = field(default_factory=list)
    """What chooses, with `source: rewards`."""


@dataclass(frozen=True)
class SplitPreferencesInputs:
    preferences: Preferences


@dataclass(frozen=True)
class RewardModelInputs:
    policy: Model
    """What it starts from."""
    data: Preferences


@dataclass(frozen=True)
class RewardBaseInputs:
    data: Dataset | None = None
    """Whose held-out replies it scores once, for the mean and deviation that its rewards are scaled by; where absent, 0
    and 1: its rewards count as they are."""


@dataclass(frozen=True)
class PPOInputs:
    policy: Model
    prompts: Dataset
    reference: Model | None = None
    """What the KL penalty is held against; the policy as it begins where absent."""
    rewards: list[RewardModel] = field(default_factory=list)
    judges: list[RewardModel] = field(default_factory=list)
    """What only looks on, in `validation`."""


@dataclass(frozen=True)
class DPOInputs:
    policy: Model
    preferences: Preferences
    reference: Model | None = None
    """What the policy is held against, and kept near; the policy as it begins where absent."""


@dataclass(frozen=True)
class KTOInputs:
    policy: Model
    preferences: Preferences | None = None
    """Chosen replies are desirable, rejected ones are not."""
    verdicts: Judgements | None = None
    """What people said of two replies: both may be desirable, or neither."""
    data: Dataset | None = None
    """What it holds out for evaluation is left out of the verdicts."""
    reference: Model | None = None


@dataclass(frozen=True)
class BestOfNInputs:
    policy: Model
    prompts: Dataset
    rewards: list[RewardModel] = field(default_factory=list)


@dataclass(frozen=True)
class EvaluateInputs:
    policy: Model
    against: Model
    prompts: Dataset
    rewards: list[RewardModel] = field(default_factory=list)
    """What the policy was trained against: shown, and no judge."""
    judges: list[RewardModel] = field(default_factory=list)
    """What it was not trained against."""
    verdicts: Judgements | None = None
    """What people said of replies of these two: one more judge."""


@dataclass(frozen=True)
class BenchmarkInputs:
    policy: Model
    prompts: Dataset
    """Whose rows are asked."""


@dataclass(frozen=True)
class LMEvalInputs:
    policy: Model


@dataclass(frozen=True)
class CompareInputs:
    policy: Model
    champion: Model
    prompts: Dataset
    rewards: list[RewardModel] = field(default_factory=list)
    judges: list[RewardModel] = field(default_factory=list)
    seen: list[Artifact] = field(default_factory=list)
    """Datasets and preferences behind the champion and not behind the candidate: what they train on is not asked."""
    verdicts: Judgements | None = None
    """What people said of replies of these two: one more judge."""
