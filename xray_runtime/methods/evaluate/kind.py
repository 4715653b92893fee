"""Declaration of the stage kind `evaluate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from xray_runtime.engines.roles import ModelRole, frozen
from xray_runtime.kernel.graph.artifacts import Dataset, Evaluation, Judgements, Model, RewardModel
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.common.checks import check_evaluation, fewer_prompts
from xray_runtime.methods.common.findings import evaluation_findings
from xray_runtime.methods.common.sampling.model_roles import sampling_models
from xray_runtime.methods.evaluate.config import EvaluationConfig


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


def evaluate_models(config: EvaluationConfig) -> dict[str, ModelRole]:
    seen: dict[str, Any] = {"rows": config.num_prompts, "reply_tokens": config.max_response_tokens}
    sides = {"before": "against", "after": "policy"}
    judged = {side: frozen(config.frozen, shape, data="prompts", **seen) for side, shape in sides.items()}
    return sampling_models(config, "against", "prompts", **seen) | judged


EVALUATE = register(
    StageKind(
        "evaluate",
        EvaluationConfig,
        EvaluateInputs,
        Evaluation,
        "xray_runtime.methods.evaluate.body:run",
        models=evaluate_models,
        check=check_evaluation,
        shorten=fewer_prompts,
        headline={"win_rate": "win rate", "gold_delta": "gold score difference", "kl": "KL"},
        findings=evaluation_findings,
        results="evaluation.json",
        sides=("policy", "against"),
    )
)
