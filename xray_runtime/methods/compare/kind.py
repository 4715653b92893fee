"""Declaration of the stage kind `compare`."""

from __future__ import annotations

from typing import Any

from xray_runtime.engines.roles import ModelRole
from xray_runtime.kernel.graph.artifacts import Comparison
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.common.checks import check_evaluation
from xray_runtime.methods.common.inputs import CompareInputs
from xray_runtime.methods.common.sampling.model_roles import sampling_models
from xray_runtime.methods.evaluate.config import EvaluationConfig


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
