"""Declaration of the stage kind `reward_base`."""

from __future__ import annotations

from dataclasses import dataclass

from xray_runtime.engines.roles import ModelRole, frozen
from xray_runtime.kernel.graph.artifacts import REWARD_HEAD, Dataset, RewardModel
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.common.checks import FEW_PROMPTS
from xray_runtime.methods.reward_model.config import RewardBaseConfig


@dataclass(frozen=True)
class RewardBaseInputs:
    data: Dataset | None = None
    """The model scores its held-out replies once, to normalize rewards by their mean and deviation; if absent, rewards
    are not normalized."""


def reward_models(config: RewardBaseConfig) -> dict[str, ModelRole]:
    return {"reward": frozen(config.frozen, None, rows=config.num_replies, data="data", scores_tokens=False)}


REWARD_BASE = register(
    StageKind(
        "reward_base",
        RewardBaseConfig,
        RewardBaseInputs,
        RewardModel,
        "xray_runtime.methods.reward_base.body:run",
        base_model=lambda config: config.model,
        models=reward_models,
        outside=lambda config: {"model": config.model},
        shorten=lambda config: config.model_copy(update={"num_replies": min(config.num_replies, FEW_PROMPTS)}),
        results="reward.json",
        title=f"an imported reward model (its head is in `{REWARD_HEAD}`)",
    )
)
