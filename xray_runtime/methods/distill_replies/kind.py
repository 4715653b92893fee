"""Declaration of the stage kind `distill_replies`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xray_runtime.engines.roles import ModelRole, frozen, trained
from xray_runtime.kernel.graph.artifacts import Dataset, Model
from xray_runtime.kernel.graph.handles import Handle
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.common.checks import FEW_STEPS, dataset_config
from xray_runtime.methods.distill_replies.config import DistillRepliesConfig


@dataclass(frozen=True)
class DistillRepliesInputs:
    policy: Model
    data: Dataset
    teacher: Model | None = None
    """Absent with `logged`."""


def distill_replies_models(config: DistillRepliesConfig) -> dict[str, ModelRole]:
    seen: dict[str, Any] = {"data": "data", "reply_tokens": config.max_response_tokens}
    models = {"policy": trained(config, "policy", batch_size=config.batch_size, **seen)}
    if config.logged is None:
        models["teacher"] = frozen(config.frozen, "teacher", rows=config.batch_size, **seen)
    return models


def check_distill_replies(config: DistillRepliesConfig, inputs: Mapping[str, Handle]) -> None:
    if (config.logged is None) != ("teacher" in inputs):
        raise ValueError("teacher: is required without logged, and is not allowed with it")
    data = dataset_config(inputs)
    for name in (config.logged.ids, config.logged.logprobs) if config.logged is not None else ():
        if data is not None and name not in data.columns:
            known = ", ".join(data.columns) or "no column"
            raise ValueError(f"logged: {name!r} is not allowed: the dataset has {known}; add it to data.columns")


DISTILL_REPLIES = register(
    StageKind(
        "distill_replies",
        DistillRepliesConfig,
        DistillRepliesInputs,
        Model,
        "xray_runtime.methods.distill_replies.body:run",
        models=distill_replies_models,
        check=check_distill_replies,
        shorten=lambda config: config.model_copy(update={"steps": FEW_STEPS}),
        panels=[
            ("divergence (nats a token)", ["distill/divergence", "distill/heldout_divergence"]),
            ("loss of SFT (nats a token)", ["distill/nll", "distill/heldout_nll"]),
            ("gradient norm", ["distill/grad_norm"]),
        ],
        headline={"distill/divergence": "divergence"},
        title="a student after distillation on given replies",
    )
)
