"""The stage kind `compare`: what it takes, needs and shows."""

from __future__ import annotations

from xray_runtime.config.evaluate import EvaluationConfig
from xray_runtime.graph.artifacts import Comparison
from xray_runtime.graph.inputs import CompareInputs
from xray_runtime.graph.kind import StageKind, register
from xray_runtime.stages.shared import called_functions, check_evaluation, frozen_layouts

COMPARE = register(
    StageKind(
        "compare",
        EvaluationConfig,
        CompareInputs,
        Comparison,
        "xray_runtime.evaluation.compare:run",
        models=lambda config: {"generator": config.generator} | frozen_layouts(config),
        functions=called_functions,
        check=check_evaluation,
        headline={"win_rate": "win rate"},
        results="comparison.json",
        sides=("policy", "champion"),
    )
)
