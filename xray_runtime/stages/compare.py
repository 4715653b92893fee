"""Declaration of the stage kind `compare`."""

from __future__ import annotations

from typing import Any

from xray_runtime.config.evaluate import EvaluationConfig
from xray_runtime.graph.artifacts import Comparison
from xray_runtime.graph.inputs import CompareInputs
from xray_runtime.graph.kind import StageKind, register
from xray_runtime.planning.roles import ModelRole
from xray_runtime.rl.model_roles import sampling_models
from xray_runtime.stages.shared import called_functions, check_evaluation


def compare_models(config: EvaluationConfig) -> dict[str, ModelRole]:
    seen: dict[str, Any] = {"rows": config.num_prompts, "reply_tokens": config.max_response_tokens}
    return sampling_models(config, "policy", "prompts", **seen)


COMPARE = register(
    StageKind(
        "compare",
        EvaluationConfig,
        CompareInputs,
        Comparison,
        "xray_runtime.evaluation.compare:run",
        models=compare_models,
        functions=called_functions,
        check=check_evaluation,
        headline={"win_rate": "win rate"},
        results="comparison.json",
        sides=("policy", "champion"),
    )
)
