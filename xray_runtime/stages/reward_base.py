"""Declaration of the stage kind `reward_base`."""

from __future__ import annotations

from xray_runtime.config.reward_model import RewardBaseConfig
from xray_runtime.graph.artifacts import REWARD_HEAD, RewardModel
from xray_runtime.graph.inputs import RewardBaseInputs
from xray_runtime.graph.kind import StageKind, register
from xray_runtime.planning.roles import ModelRole, frozen
from xray_runtime.stages.shared import FEW_PROMPTS


def reward_models(config: RewardBaseConfig) -> dict[str, ModelRole]:
    return {"reward": frozen(config.frozen, None, rows=config.num_replies, data="data", scores_tokens=False)}


REWARD_BASE = register(
    StageKind(
        "reward_base",
        RewardBaseConfig,
        RewardBaseInputs,
        RewardModel,
        "xray_runtime.preparation.reward_base:run",
        base_model=lambda config: config.model,
        models=reward_models,
        outside=lambda config: {"model": config.model},
        shorten=lambda config: config.model_copy(update={"num_replies": min(config.num_replies, FEW_PROMPTS)}),
        results="reward.json",
        title=f"an imported reward model (its head is in `{REWARD_HEAD}`)",
    )
)
