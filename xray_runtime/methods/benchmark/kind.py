"""Declaration of the stage kind `benchmark`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xray_runtime.engines.roles import ModelRole, frozen, sampled
from xray_runtime.kernel.graph.artifacts import Benchmark
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.benchmark.config import (
    BenchmarkConfig,
    EnvironmentSuite,
    PassAtKSuite,
    PerplexitySuite,
    WordsSuite,
)
from xray_runtime.methods.common.checks import FEW_PROMPTS
from xray_runtime.methods.common.inputs import BenchmarkInputs
from xray_runtime.methods.prepare.config import DataConfig


def _benchmark_models(config: Any) -> dict[str, ModelRole]:
    if isinstance(config, PerplexitySuite):
        seen: dict[str, Any] = {"rows": config.num_rows, "reply_tokens": config.max_response_tokens}
        return {"policy": frozen(config.frozen, "policy", data="prompts", **seen)}
    reply = config.environment.max_tokens if isinstance(config, EnvironmentSuite) else config.max_new_tokens
    rows = config.num_prompts * getattr(config, "samples", 1)
    return {"generator": sampled(config.generator, "policy", data="prompts", rows=rows, reply_tokens=reply)}


def _benchmark_reads(config: Any) -> dict[str, str]:
    lists = config.lists if isinstance(config, WordsSuite) else {}
    return {f"lists.{name}": words for name, words in lists.items() if isinstance(words, str)}


def _fewer_rows(config: Any) -> Any:
    field = "num_rows" if isinstance(config, PerplexitySuite) else "num_prompts"
    return config.model_copy(update={field: min(getattr(config, field), FEW_PROMPTS)})


def check_benchmark(config: Any, inputs: Mapping[str, Any]) -> None:
    call = inputs["prompts"].call
    data = call.config if call is not None else None
    if isinstance(data, DataConfig) and config.split == "validation" and not data.validation_fraction:
        raise ValueError(
            "split: 'validation' is not allowed: the dataset has no validation rows; set its validation_fraction"
        )
    column = config.verifier.column if isinstance(config, PassAtKSuite) else None
    if column is not None and isinstance(data, DataConfig) and column not in data.columns:
        raise ValueError(
            f"verifier.column: {column!r} is not allowed: the dataset has "
            f"{', '.join(data.columns) or 'no column'}; add it to data.columns"
        )


BENCHMARK = register(
    StageKind(
        "benchmark",
        BenchmarkConfig,
        BenchmarkInputs,
        Benchmark,
        "xray_runtime.methods.benchmark.body:run",
        models=_benchmark_models,
        outside=_benchmark_reads,
        check=check_benchmark,
        shorten=_fewer_rows,
        results="benchmark.json",
        sides=("policy",),
    )
)
