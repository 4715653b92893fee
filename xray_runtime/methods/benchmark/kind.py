"""Declaration of the stage kind `benchmark`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xray_runtime.engines.roles import ModelRole, frozen, sampled
from xray_runtime.kernel.graph.artifacts import Benchmark, Dataset, Model
from xray_runtime.kernel.graph.handles import Handle
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.benchmark.config import (
    BenchmarkConfig,
    PassAtKSuite,
    PerplexitySuite,
    SampledSuite,
    SideConfig,
    WordsSuite,
)
from xray_runtime.methods.common.checks import FEW_PROMPTS, check_column
from xray_runtime.methods.prepare.config import DataConfig


@dataclass(frozen=True)
class BenchmarkInputs:
    policy: Model
    prompts: Dataset
    """Supplies the prompts."""


def _benchmark_models(config: PerplexitySuite | SampledSuite) -> dict[str, ModelRole]:
    if isinstance(config, PerplexitySuite):
        seen: dict[str, Any] = {"rows": config.num_rows, "reply_tokens": config.max_response_tokens}
        return {"policy": frozen(config.frozen, "policy", data="prompts", **seen)}
    seen = {"rows": config.num_replies, "reply_tokens": config.max_response_tokens}
    return {"generator": sampled(config.generator, "policy", data="prompts", **seen)}


def _benchmark_reads(config: SideConfig) -> dict[str, str]:
    lists = config.lists if isinstance(config, WordsSuite) else {}
    return {f"lists.{name}": words for name, words in lists.items() if isinstance(words, str)}


def _fewer_rows(config: PerplexitySuite | SampledSuite) -> PerplexitySuite | SampledSuite:
    if isinstance(config, PerplexitySuite):
        return config.model_copy(update={"num_rows": min(config.num_rows, FEW_PROMPTS)})
    return config.model_copy(update={"num_prompts": min(config.num_prompts, FEW_PROMPTS)})


def check_benchmark(config: SideConfig, inputs: Mapping[str, Handle]) -> None:
    call = inputs["prompts"].call
    data = call.config if call is not None else None
    if isinstance(data, DataConfig) and config.split == "validation" and not data.validation_fraction:
        raise ValueError(
            "split: 'validation' is not allowed: the dataset has no validation rows; set its validation_fraction"
        )
    column = config.verifier.column if isinstance(config, PassAtKSuite) else None
    check_column(inputs, "verifier.column", column)


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
