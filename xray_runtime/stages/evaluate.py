"""The stage kind `evaluate`: what it takes, needs and shows."""

from __future__ import annotations

from xray_runtime.config.evaluate import EvaluationConfig
from xray_runtime.graph.artifacts import Evaluation
from xray_runtime.graph.inputs import EvaluateInputs
from xray_runtime.graph.kind import StageKind, register
from xray_runtime.stages.findings import evaluation_findings
from xray_runtime.stages.shared import called_functions, check_evaluation, fewer_prompts, frozen_layouts

EVALUATE = register(
    StageKind(
        "evaluate",
        EvaluationConfig,
        EvaluateInputs,
        Evaluation,
        "xray_runtime.evaluation.evaluate:run",
        models=lambda config: {"generator": config.generator} | frozen_layouts(config, "before", "after"),
        functions=called_functions,
        check=check_evaluation,
        shorten=fewer_prompts,
        headline={"win_rate": "win rate", "gold_delta": "gold score difference", "kl": "KL"},
        findings=evaluation_findings,
        results="evaluation.json",
        sides=("policy", "against"),
    )
)
