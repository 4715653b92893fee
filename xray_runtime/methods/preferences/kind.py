"""Declaration of the stage kind `preferences`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xray_runtime.engines.roles import ModelRole, sampled
from xray_runtime.kernel.graph.artifacts import Artifact, Curated, Dataset, Judgements, Model, Preferences, RewardModel
from xray_runtime.kernel.graph.handles import Handle
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.common.checks import check_rewards, dataset_config, fewer_prompts, num_samples
from xray_runtime.methods.common.findings import preferences_findings
from xray_runtime.methods.common.sampling.model_roles import sampling_models
from xray_runtime.methods.preferences.config import (
    CuratedPreferences,
    DatasetPreferences,
    GoldPreferences,
    JudgedPreferences,
    PreferencesStageConfig,
    RatingPreferences,
    RewardedPreferences,
    SampledPreferences,
)


@dataclass(frozen=True)
class PreferencesInputs:
    policy: Model | None = None
    """The model whose replies are labelled, with `source: gold` and `source: rewards`."""
    data: Dataset | None = None
    """Supplies the prompts. Prompts that it holds out for evaluation are left out of pairs from other sources."""
    judgements: Judgements | None = None
    rewards: list[RewardModel] = field(default_factory=list)
    """Choose the preferred reply, with `source: rewards`."""


FEW_PAIRS = 64
CHITCHAT = "chitchat"


def _preferences_read(config: PreferencesStageConfig) -> dict[str, str]:
    if isinstance(config, RatingPreferences):
        # The ratings are part of the conversations, so no field names them.
        return {"ratings": CHITCHAT}
    if not isinstance(config, DatasetPreferences):
        return {}
    return {"path": config.path} | ({"pictures": config.pictures} if config.pictures is not None else {})


def _preferences_models(config: PreferencesStageConfig) -> dict[str, ModelRole]:
    if isinstance(config, RewardedPreferences):
        return sampling_models(config, "policy", "data", rows=num_samples(config), reply_tokens=config.max_new_tokens)
    if not isinstance(config, SampledPreferences):
        return {}
    seen: dict[str, Any] = {"rows": 2 * config.num_pairs, "reply_tokens": config.max_new_tokens}
    return {"generator": sampled(config.generator, "policy", data="data", **seen)}


def _fewer_preferences(config: PreferencesStageConfig) -> PreferencesStageConfig:
    if isinstance(config, RewardedPreferences):
        return fewer_prompts(config)
    if isinstance(config, GoldPreferences):
        return config.model_copy(update={"num_pairs": min(config.num_pairs, FEW_PAIRS)})
    return config


def check_preferences(config: PreferencesStageConfig, inputs: Mapping[str, Handle]) -> None:
    sampled = isinstance(config, GoldPreferences | RewardedPreferences)
    needed: tuple[str, ...] = ("policy", "data") if sampled else ()
    needed = ("data",) if isinstance(config, RatingPreferences) else needed
    needed = ("judgements",) if isinstance(config, JudgedPreferences | CuratedPreferences) else needed
    for role in needed:
        if role not in inputs:
            raise ValueError(f"{role}: is required with source {config.source!r}")
    data = dataset_config(inputs) if isinstance(config, RatingPreferences) else None
    if data is not None and (data.source != CHITCHAT or data.sources):
        raise ValueError(
            f"source 'ratings' needs a dataset with source {CHITCHAT!r} (got {data.source!r}): only those "
            "conversations carry ratings"
        )
    # A plan does not open checkpoints, so their type is unknown.
    if isinstance(config, CuratedPreferences) and inputs["judgements"].output not in (Curated, Artifact):
        raise ValueError("judgements: must be the output of `curate` with source 'curated'")
    if isinstance(config, RewardedPreferences):
        check_rewards(config, inputs)


PREFERENCES = register(
    StageKind(
        "preferences",
        PreferencesStageConfig,
        PreferencesInputs,
        Preferences,
        "xray_runtime.methods.preferences.body:run",
        models=_preferences_models,
        outside=_preferences_read,
        check=check_preferences,
        findings=preferences_findings,
        shorten=_fewer_preferences,
        headline={"pairs": "pairs"},
        results="stats.json",
    )
)
