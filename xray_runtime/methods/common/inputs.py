"""The inputs of each stage kind: fields are roles, with the allowed types."""

from __future__ import annotations

from dataclasses import dataclass, field

from xray_runtime.kernel.graph.artifacts import (
    Artifact,
    Curated,
    Dataset,
    Feedback,
    Judgements,
    Model,
    Preferences,
    RewardModel,
)


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
    """The model whose replies are labelled, with `source: gold` and `source: rewards`."""
    data: Dataset | None = None
    """Supplies the prompts. Prompts that it holds out for evaluation are left out of pairs from other sources."""
    judgements: Judgements | None = None
    rewards: list[RewardModel] = field(default_factory=list)
    """Choose the preferred reply, with `source: rewards`."""


@dataclass(frozen=True)
class CurateInputs:
    feedback: list[Feedback] = field(default_factory=list)
    """One collection for each cycle, the oldest first."""
    verdicts: list[Judgements] = field(default_factory=list)
    """Human verdicts on two replies each; they count for the last cycle."""


@dataclass(frozen=True)
class DemonstrationsInputs:
    curated: Curated


@dataclass(frozen=True)
class RecordedPromptsInputs:
    feedback: list[Feedback]
    seen: list[Artifact] = field(default_factory=list)
    """Datasets and preferences that the models were trained on: prompts in their training part are left out."""


@dataclass(frozen=True)
class SplitPreferencesInputs:
    preferences: Preferences


@dataclass(frozen=True)
class RewardModelInputs:
    policy: Model
    """The model to start from."""
    data: Preferences


@dataclass(frozen=True)
class RewardBaseInputs:
    data: Dataset | None = None
    """The model scores its held-out replies once, to normalize rewards by their mean and deviation; if absent, rewards
    are not normalized."""


@dataclass(frozen=True)
class PPOInputs:
    policy: Model
    prompts: Dataset
    reference: Model | None = None
    """Reference of the KL penalty; the initial policy if absent."""
    rewards: list[RewardModel] = field(default_factory=list)
    judges: list[RewardModel] = field(default_factory=list)
    """Judges for `validation` only; the policy is not trained on their scores."""


@dataclass(frozen=True)
class DPOInputs:
    policy: Model
    preferences: Preferences
    reference: Model | None = None
    """Reference of the loss; the initial policy if absent."""


@dataclass(frozen=True)
class KTOInputs:
    policy: Model
    preferences: Preferences | None = None
    """Chosen replies are desirable, rejected ones are not."""
    verdicts: Judgements | None = None
    """Human verdicts on two replies each: both may be desirable, or neither."""
    data: Dataset | None = None
    """Prompts that it holds out for evaluation are left out of the verdicts."""
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
    """Reward models that the policy was trained on: shown in the report, but not used as judges."""
    judges: list[RewardModel] = field(default_factory=list)
    """Reward models that the policy was not trained on."""
    verdicts: Judgements | None = None
    """Human verdicts on replies of these two: one more judge."""


@dataclass(frozen=True)
class BenchmarkInputs:
    policy: Model
    prompts: Dataset
    """Supplies the prompts."""


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
    """Datasets and preferences of the champion that the candidate does not have: prompts in their training part are not
    used."""
    verdicts: Judgements | None = None
    """Human verdicts on replies of these two: one more judge."""
