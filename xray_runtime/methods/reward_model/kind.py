"""Declaration of the stage kind `reward_model`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xray_runtime.engines.roles import ModelRole, trained
from xray_runtime.kernel.graph.artifacts import REWARD_HEAD, Model, Preferences, RewardModel
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.common.findings import pairs_findings
from xray_runtime.methods.reward_model.config import RewardConfig


@dataclass(frozen=True)
class RewardModelInputs:
    policy: Model
    """The model to start from."""
    data: Preferences


def reward_models(config: RewardConfig) -> dict[str, ModelRole]:
    pairs: dict[str, Any] = {"batch_size": config.batch_size, "data": "data", "sequences_per_row": 2}
    return {"reward": trained(config, "policy", scores_tokens=False, **pairs)}


REWARD_MODEL = register(
    StageKind(
        "reward_model",
        RewardConfig,
        RewardModelInputs,
        RewardModel,
        "xray_runtime.methods.reward_model.body:run",
        models=reward_models,
        shorten=lambda config: config.model_copy(update={"epochs": 1}),
        panels=[
            ("loss", ["reward_model/loss"]),
            (
                "pairs in the right order",
                ["reward_model/accuracy", "reward_model/heldout_accuracy", "reward_model/length_baseline_accuracy"],
            ),
            ("gradient norm", ["reward_model/grad_norm"]),
        ],
        headline={"reward_model/loss": "loss", "accuracy": "held-out accuracy"},
        results="reward.json",
        findings=pairs_findings,
        title=f"a reward model (its head is in `{REWARD_HEAD}`)",
    )
)
