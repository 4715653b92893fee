"""Declaration of the stage kind `kto`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xray_runtime.engines.roles import trained
from xray_runtime.kernel.graph.artifacts import Dataset, Judgements, Model, Preferences
from xray_runtime.kernel.graph.handles import Handle
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.common.findings import pairs_findings
from xray_runtime.methods.kto.config import KTOConfig


@dataclass(frozen=True)
class KTOInputs:
    policy: Model
    preferences: Preferences | None = None
    """Chosen replies are desirable, rejected ones are not."""
    verdicts: Judgements | None = None
    """Human verdicts on two replies each: both may be desirable, or neither."""
    data: Dataset | None = None
    """Prompts that it holds out for evaluation are left out of the verdicts."""
    reference: Model | None = None


def check_kto(config: KTOConfig, inputs: Mapping[str, Handle]) -> None:
    if not {"preferences", "verdicts"} & set(inputs):
        raise ValueError("preferences: is required unless verdicts are given")
    if "verdicts" in inputs and "data" not in inputs:
        raise ValueError("data: is required with verdicts: the stage does not train on the dataset's held-out prompts")


KTO = register(
    StageKind(
        "kto",
        KTOConfig,
        KTOInputs,
        Model,
        "xray_runtime.methods.kto.body:run",
        models=lambda config: {"policy": trained(config, "policy", batch_size=config.batch_size, data="preferences")},
        check=check_kto,
        shorten=lambda config: config.model_copy(update={"epochs": 1}),
        panels=[
            ("loss", ["kto/loss", "kto/validation_loss"]),
            ("implicit rewards", ["kto/desirable_reward", "kto/undesirable_reward"]),
            ("z, KL to the reference (nats a reply)", ["kto/baseline"]),
            ("held-out pairs in the right order", ["kto/heldout_accuracy"]),
            ("gradient norm", ["kto/grad_norm"]),
        ],
        headline={"kto/loss": "loss", "kto/heldout_accuracy": "held-out accuracy"},
        findings=pairs_findings,
        title="a policy after learning from desirable and undesirable replies",
    )
)
