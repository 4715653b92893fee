"""Declaration of the stage kind `compare`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from xray_runtime.engines.roles import ModelRole
from xray_runtime.kernel.graph.artifacts import Artifact, Comparison, Dataset, Judgements, Model, RewardModel
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.common.checks import check_evaluation
from xray_runtime.methods.common.sampling.model_roles import sampling_models
from xray_runtime.methods.evaluate.config import EvaluationConfig


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


def compare_models(config: EvaluationConfig) -> dict[str, ModelRole]:
    seen: dict[str, Any] = {"rows": config.num_prompts, "reply_tokens": config.max_response_tokens}
    return sampling_models(config, "policy", "prompts", **seen)


COMPARE = register(
    StageKind(
        "compare",
        EvaluationConfig,
        CompareInputs,
        Comparison,
        "xray_runtime.methods.compare.body:run",
        models=compare_models,
        check=check_evaluation,
        headline={"win_rate": "win rate"},
        results="comparison.json",
        sides=("policy", "champion"),
    )
)
