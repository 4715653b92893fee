"""Declarations of the stage kinds that evaluate a policy."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xray_runtime.config.benchmark import BenchmarkConfig, EnvironmentSuite, PassAtKSuite, PerplexitySuite, WordsSuite
from xray_runtime.config.evaluate import EvaluationConfig
from xray_runtime.config.lm_eval import LMEvalConfig
from xray_runtime.evaluation.harness_files import read_tasks
from xray_runtime.evaluation.judge_leakage import check_judges
from xray_runtime.graph.artifacts import Benchmark, Comparison, Evaluation
from xray_runtime.graph.inputs import BenchmarkInputs, CompareInputs, EvaluateInputs, LMEvalInputs
from xray_runtime.graph.kind import StageKind
from xray_runtime.planning.roles import ModelRole, frozen, sampled
from xray_runtime.rl.model_roles import sampling_models
from xray_runtime.stages.findings import evaluation_findings
from xray_runtime.stages.shared import (
    FEW_PROMPTS,
    agent_reads,
    called_functions,
    check_column,
    check_terms,
    check_validation_rows,
    fewer_prompts,
)


def _compare_models(config: EvaluationConfig) -> dict[str, ModelRole]:
    seen: dict[str, Any] = {"rows": config.num_prompts, "reply_tokens": config.max_response_tokens}
    return sampling_models(config, "policy", "prompts", **seen)


def _evaluate_models(config: EvaluationConfig) -> dict[str, ModelRole]:
    seen: dict[str, Any] = {"rows": config.num_prompts, "reply_tokens": config.max_response_tokens}
    sides = {"before": "against", "after": "policy"}
    judged = {side: frozen(config.frozen, shape, data="prompts", **seen) for side, shape in sides.items()}
    return sampling_models(config, "against", "prompts", **seen) | judged


def _check_evaluation(config: EvaluationConfig, inputs: Mapping[str, Any]) -> None:
    check_terms(config, inputs)
    check_terms(config, inputs, "judges")
    check_judges(config, inputs)


def _benchmark_models(config: Any) -> dict[str, ModelRole]:
    if isinstance(config, PerplexitySuite):
        seen: dict[str, Any] = {"rows": config.num_rows, "reply_tokens": config.max_response_tokens}
        return {"policy": frozen(config.frozen, "policy", data="prompts", **seen)}
    reply = config.environment.max_tokens if isinstance(config, EnvironmentSuite) else config.max_new_tokens
    rows = config.num_prompts * getattr(config, "samples", 1)
    return {"generator": sampled(config.generator, "policy", data="prompts", rows=rows, reply_tokens=reply)}


def _benchmark_reads(config: Any) -> dict[str, str]:
    lists = config.lists if isinstance(config, WordsSuite) else {}
    return agent_reads(config) | {f"lists.{name}": words for name, words in lists.items() if isinstance(words, str)}


def _fewer_rows(config: Any) -> Any:
    field = "num_rows" if isinstance(config, PerplexitySuite) else "num_prompts"
    return config.model_copy(update={field: min(getattr(config, field), FEW_PROMPTS)})


def _check_benchmark(config: Any, inputs: Mapping[str, Any]) -> None:
    if config.split == "validation":
        check_validation_rows("split: 'validation'", inputs)
    if isinstance(config, PassAtKSuite) and config.verifier.column is not None:
        check_column("verifier.column", config.verifier.column, inputs)


def _check_lm_eval(config: LMEvalConfig, inputs: Mapping[str, Any]) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("task: the package lm_eval is not installed: pip install 'xray-rlhf[lm-eval]'")
    directory = Path(config.task)
    # A graph may be written on a machine without its files.
    if directory.is_dir():
        read_tasks(directory, "task")


def _lm_eval_models(config: LMEvalConfig) -> dict[str, ModelRole]:
    # The task decides which of the two is used.
    seen: dict[str, Any] = {"rows": config.limit or 1024, "reply_tokens": config.max_new_tokens}
    return {
        "policy": frozen(config.frozen, "policy", **seen),
        "generator": sampled(config.generator, "policy", **seen),
    }


EVALUATE = StageKind(
    "evaluate",
    EvaluationConfig,
    EvaluateInputs,
    Evaluation,
    "xray_runtime.evaluation.evaluate:run",
    models=_evaluate_models,
    outside=agent_reads,
    functions=called_functions,
    check=_check_evaluation,
    shorten=fewer_prompts,
    headline={"win_rate": "win rate", "gold_delta": "gold score difference", "kl": "KL"},
    findings=evaluation_findings,
    results="evaluation.json",
    sides=("policy", "against"),
)

COMPARE = StageKind(
    "compare",
    EvaluationConfig,
    CompareInputs,
    Comparison,
    "xray_runtime.evaluation.compare:run",
    models=_compare_models,
    functions=called_functions,
    check=_check_evaluation,
    headline={"win_rate": "win rate"},
    results="comparison.json",
    sides=("policy", "champion"),
)

BENCHMARK = StageKind(
    "benchmark",
    BenchmarkConfig,
    BenchmarkInputs,
    Benchmark,
    "xray_runtime.evaluation.benchmark:run",
    models=_benchmark_models,
    outside=_benchmark_reads,
    functions=called_functions,
    check=_check_benchmark,
    shorten=_fewer_rows,
    results="benchmark.json",
    sides=("policy",),
)

LM_EVAL = StageKind(
    "lm_eval",
    LMEvalConfig,
    LMEvalInputs,
    Benchmark,
    "xray_runtime.evaluation.harness_task:run",
    models=_lm_eval_models,
    outside=lambda config: {"task": config.task},
    check=_check_lm_eval,
    shorten=lambda config: config.model_copy(update={"limit": min(config.limit or FEW_PROMPTS, FEW_PROMPTS)}),
    results="benchmark.json",
    sides=("policy",),
)
