"""Declaration of the stage kind `evaluate`."""

from __future__ import annotations

from typing import Any

from xray_runtime.engines.roles import ModelRole, frozen
from xray_runtime.kernel.graph.artifacts import Evaluation
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.common.checks import check_evaluation, fewer_prompts
from xray_runtime.methods.common.findings import evaluation_findings
from xray_runtime.methods.common.inputs import EvaluateInputs
from xray_runtime.methods.common.sampling.model_roles import sampling_models
from xray_runtime.methods.evaluate.config import EvaluationConfig


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
