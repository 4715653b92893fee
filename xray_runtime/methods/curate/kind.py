"""Declarations of the stage kinds `curate`, `demonstrations` and `recorded_prompts`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xray_runtime.kernel.config.section import Section
from xray_runtime.kernel.graph.artifacts import Artifact, Curated, Dataset, Feedback, Judgements
from xray_runtime.kernel.graph.handles import Handle
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.curate.config import CurateConfig, RecordedPromptsConfig


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


def check_curate(config: CurateConfig, inputs: Mapping[str, Handle]) -> None:
    if not {role.partition(".")[0] for role in inputs} & {"feedback", "verdicts"}:
        raise ValueError("feedback: is required unless verdicts are given")


CURATE = register(
    StageKind(
        "curate",
        CurateConfig,
        CurateInputs,
        Curated,
        "xray_runtime.methods.curate.body:run",
        computes=False,
        outside=lambda config: {"gold": config.gold} if config.gold is not None else {},
        check=check_curate,
        headline={"pairs_train": "pairs", "labels_train": "labels", "judges_left_out": "judges left out"},
        results="stats.json",
    )
)

DEMONSTRATIONS = register(
    StageKind(
        "demonstrations",
        Section,
        DemonstrationsInputs,
        Dataset,
        "xray_runtime.methods.curate.recorded_data:demonstrations",
        computes=False,
        results="stats.json",
    )
)

RECORDED_PROMPTS = register(
    StageKind(
        "recorded_prompts",
        RecordedPromptsConfig,
        RecordedPromptsInputs,
        Dataset,
        "xray_runtime.methods.curate.recorded_data:prompts",
        computes=False,
        results="stats.json",
    )
)
