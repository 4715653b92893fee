"""Declarations of the stage kinds that make data to train or evaluate on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xray_runtime.config.best_of_n import BestOfNConfig, GroupsConfig
from xray_runtime.config.curate import CurateConfig, RecordedPromptsConfig
from xray_runtime.config.engines import Section
from xray_runtime.config.preferences import (
    CuratedPreferences,
    DatasetPreferences,
    PreferencesStageConfig,
    RatingPreferences,
    RewardedPreferences,
    SampledPreferences,
    SplitPreferencesConfig,
)
from xray_runtime.config.prepare import DataConfig
from xray_runtime.graph.artifacts import Artifact, Curated, Dataset, Preferences
from xray_runtime.graph.inputs import (
    BestOfNInputs,
    CurateInputs,
    DemonstrationsInputs,
    PreferencesInputs,
    RecordedPromptsInputs,
    SplitPreferencesInputs,
)
from xray_runtime.graph.kind import NoInputs, StageKind
from xray_runtime.planning.roles import ModelRole, sampled
from xray_runtime.rl.model_roles import sampling_models
from xray_runtime.stages.findings import data_findings, preferences_findings
from xray_runtime.stages.shared import agent_reads, called_functions, check_rewards, fewer_prompts

FEW_PAIRS = 64
ALL_PROMPTS = 1024
"""Number of prompts to plan for if a stage uses all prompts of a dataset."""
NEEDED = {
    "gold": ("policy", "data"),
    "rewards": ("policy", "data"),
    "ratings": ("data",),
    "judgements": ("judgements",),
    "curated": ("judgements",),
}
"""Source of `preferences` → the inputs it requires."""


def _data_read(config: DataConfig) -> dict[str, str]:
    mixed = {f"sources.{number}.source": part.source for number, part in enumerate(config.sources)}
    withdrawn = {"withdrawn": config.withdrawn} if config.withdrawn is not None else {}
    return (mixed or {"source": config.source}) | withdrawn


def _groups_models(config: GroupsConfig, data: str, reply_tokens: int) -> dict[str, ModelRole]:
    rows = config.samples * (config.num_prompts or ALL_PROMPTS)
    return sampling_models(config, "policy", data, rows=rows, reply_tokens=reply_tokens)


def _preferences_read(config: Any) -> dict[str, str]:
    if isinstance(config, RatingPreferences):
        # The ratings are part of the conversations, so no field names them.
        return {"ratings": "chitchat"}
    return {"path": config.path} if isinstance(config, DatasetPreferences) else {}


def _preferences_models(config: Any) -> dict[str, ModelRole]:
    if isinstance(config, RewardedPreferences):
        return _groups_models(config, "data", config.max_new_tokens)
    if not isinstance(config, SampledPreferences):
        return {}
    seen: dict[str, Any] = {"rows": 2 * config.num_pairs, "reply_tokens": config.max_new_tokens}
    return {"generator": sampled(config.generator, "policy", data="data", **seen)}


def _fewer_preferences(config: Any) -> Any:
    if isinstance(config, RewardedPreferences):
        return fewer_prompts(config)
    if isinstance(config, SampledPreferences):
        return config.model_copy(update={"num_pairs": min(config.num_pairs, FEW_PAIRS)})
    return config


def _check_preferences(config: Any, inputs: Mapping[str, Any]) -> None:
    for role in NEEDED.get(config.source, ()):
        if role not in inputs:
            raise ValueError(f"{role}: is required with source {config.source!r}")
    # A plan does not open checkpoints, so their type is unknown.
    if isinstance(config, CuratedPreferences) and inputs["judgements"].output not in (Curated, Artifact):
        raise ValueError("judgements: must be the output of `curate` with source 'curated'")
    if isinstance(config, RewardedPreferences):
        check_rewards(config, inputs)


def _check_curate(config: CurateConfig, inputs: Mapping[str, Any]) -> None:
    if not {role.partition(".")[0] for role in inputs} & {"feedback", "verdicts"}:
        raise ValueError("feedback: is required unless verdicts are given")


PREPARE = StageKind(
    "prepare",
    DataConfig,
    NoInputs,
    Dataset,
    "xray_runtime.preparation.prepare:run",
    computes=False,
    outside=_data_read,
    headline={"train_pairs": "training pairs", "heldout_pairs": "held-out pairs"},
    findings=data_findings,
    results="stats.json",
)

PREFERENCES = StageKind(
    "preferences",
    PreferencesStageConfig,
    PreferencesInputs,
    Preferences,
    "xray_runtime.preparation.preferences:run",
    models=_preferences_models,
    outside=_preferences_read,
    functions=called_functions,
    check=_check_preferences,
    findings=preferences_findings,
    shorten=_fewer_preferences,
    headline={"pairs": "pairs"},
    results="stats.json",
)

SPLIT_PREFERENCES = StageKind(
    "split_preferences",
    SplitPreferencesConfig,
    SplitPreferencesInputs,
    Preferences,
    "xray_runtime.preparation.split_preferences:run",
    computes=False,
    results="stats.json",
)

BEST_OF_N = StageKind(
    "best_of_n",
    BestOfNConfig,
    BestOfNInputs,
    Dataset,
    "xray_runtime.rl.best_of_n:run",
    models=lambda config: _groups_models(config, "prompts", config.max_response_tokens),
    outside=agent_reads,
    functions=called_functions,
    check=check_rewards,
    shorten=fewer_prompts,
    results="stats.json",
    title="the best of several sampled replies to each prompt",
)

CURATE = StageKind(
    "curate",
    CurateConfig,
    CurateInputs,
    Curated,
    "xray_runtime.preparation.curate:run",
    computes=False,
    outside=lambda config: {"gold": config.gold} if config.gold is not None else {},
    check=_check_curate,
    headline={"pairs_train": "pairs", "labels_train": "labels", "judges_left_out": "judges left out"},
    results="stats.json",
)

DEMONSTRATIONS = StageKind(
    "demonstrations",
    Section,
    DemonstrationsInputs,
    Dataset,
    "xray_runtime.preparation.recorded_data:demonstrations",
    computes=False,
    results="stats.json",
)

RECORDED_PROMPTS = StageKind(
    "recorded_prompts",
    RecordedPromptsConfig,
    RecordedPromptsInputs,
    Dataset,
    "xray_runtime.preparation.recorded_data:prompts",
    computes=False,
    results="stats.json",
)
