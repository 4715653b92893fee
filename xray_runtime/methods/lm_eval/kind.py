"""Declaration of the stage kind `lm_eval`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xray_runtime.engines.roles import ModelRole, frozen, sampled
from xray_runtime.kernel.graph.artifacts import Benchmark, Model
from xray_runtime.kernel.graph.handles import Handle
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.common.checks import FEW_PROMPTS
from xray_runtime.methods.lm_eval.config import LMEvalConfig
from xray_runtime.methods.lm_eval.harness_files import read_tasks


@dataclass(frozen=True)
class LMEvalInputs:
    policy: Model


def check_lm_eval(config: LMEvalConfig, inputs: Mapping[str, Handle]) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("task: the package lm_eval is not installed: pip install 'xray-rlhf[lm-eval]'")
    directory = Path(config.task)
    # A graph may be written on a machine without its files.
    if directory.is_dir():
        read_tasks(directory, "task")


def lm_eval_models(config: LMEvalConfig) -> dict[str, ModelRole]:
    # The task decides which of the two is used.
    seen: dict[str, Any] = {"rows": config.limit or 1024, "reply_tokens": config.max_new_tokens}
    return {
        "policy": frozen(config.frozen, "policy", **seen),
        "generator": sampled(config.generator, "policy", **seen),
    }


LM_EVAL = register(
    StageKind(
        "lm_eval",
        LMEvalConfig,
        LMEvalInputs,
        Benchmark,
        "xray_runtime.methods.lm_eval.body:run",
        models=lm_eval_models,
        outside=lambda config: {"task": config.task},
        check=check_lm_eval,
        shorten=lambda config: config.model_copy(update={"limit": min(config.limit or FEW_PROMPTS, FEW_PROMPTS)}),
        results="benchmark.json",
        sides=("policy",),
    )
)
