"""Declaration of the stage kind `sft`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xray_runtime.engines.roles import ModelRole, trained
from xray_runtime.kernel.graph.artifacts import Dataset, Model
from xray_runtime.kernel.graph.handles import Handle
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.common.checks import FEW_STEPS, check_validation
from xray_runtime.methods.common.findings import sft_findings
from xray_runtime.methods.sft.config import SFTConfig


@dataclass(frozen=True)
class SFTInputs:
    base: Model
    data: Dataset


def sft_models(config: SFTConfig) -> dict[str, ModelRole]:
    seen: dict[str, Any] = {"data": "data", "reply_tokens": config.max_response_tokens}
    return {"policy": trained(config, "base", batch_size=config.batch_size, **seen)}


def check_sft(config: SFTConfig, inputs: Mapping[str, Handle]) -> None:
    check_validation(config, inputs["data"])


SFT = register(
    StageKind(
        "sft",
        SFTConfig,
        SFTInputs,
        Model,
        "xray_runtime.methods.sft.body:run",
        models=sft_models,
        check=check_sft,
        shorten=lambda config: config.model_copy(update={"steps": FEW_STEPS}),
        panels=[
            ("loss (nats a token)", ["sft/loss", "sft/heldout_loss", "sft/validation_loss"]),
            ("gradient norm", ["sft/grad_norm"]),
            ("tokens a second", ["speed/train_tokens_per_s"]),
        ],
        headline={"sft/loss": "loss"},
        findings=sft_findings,
        title="supervised fine-tuning on human replies",
    )
)
