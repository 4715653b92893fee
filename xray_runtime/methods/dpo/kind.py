"""Declaration of the stage kind `dpo`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xray_runtime.engines.roles import ModelRole, trained
from xray_runtime.kernel.graph.artifacts import Model, Preferences
from xray_runtime.kernel.graph.handles import Handle
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.common.findings import pairs_findings
from xray_runtime.methods.dpo.config import DPOConfig


@dataclass(frozen=True)
class DPOInputs:
    policy: Model
    preferences: Preferences
    reference: Model | None = None
    """Reference of the loss; the initial policy if absent."""


def dpo_models(config: DPOConfig) -> dict[str, ModelRole]:
    pairs: dict[str, Any] = {"batch_size": config.batch_size, "data": "preferences", "sequences_per_row": 2}
    return {"policy": trained(config, "policy", **pairs)}


def check_dpo(config: DPOConfig, inputs: Mapping[str, Handle]) -> None:
    if not config.has_reference and "reference" in inputs:
        raise ValueError(f"reference: is not allowed with loss {config.loss!r}, which does not use one")


DPO = register(
    StageKind(
        "dpo",
        DPOConfig,
        DPOInputs,
        Model,
        "xray_runtime.methods.dpo.body:run",
        models=dpo_models,
        check=check_dpo,
        shorten=lambda config: config.model_copy(update={"epochs": 1}),
        panels=[
            ("loss", ["dpo/loss", "dpo/heldout_loss", "dpo/validation_loss"]),
            ("pairs in the right order", ["dpo/accuracy", "dpo/heldout_accuracy"]),
            ("margin of implicit rewards", ["dpo/margin", "dpo/heldout_margin"]),
            ("log-probability (nats a reply)", ["dpo/chosen_logprobs", "dpo/rejected_logprobs"]),
            ("gradient norm", ["dpo/grad_norm"]),
        ],
        headline={"dpo/loss": "loss", "dpo/heldout_accuracy": "held-out accuracy"},
        findings=pairs_findings,
        title="a policy after learning from preference pairs",
    )
)
