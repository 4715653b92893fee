"""Declarations of the stage kinds that import or make a model: `base`, `fresh_base`, `reward_base`."""

from __future__ import annotations

from xray_runtime.config.base import FreshBase, HubModel
from xray_runtime.config.reward_model import RewardBaseConfig
from xray_runtime.graph.artifacts import REWARD_HEAD, Model, RewardModel
from xray_runtime.graph.inputs import FreshBaseInputs, RewardBaseInputs
from xray_runtime.graph.kind import NoInputs, StageKind
from xray_runtime.planning.roles import ModelRole, frozen
from xray_runtime.stages.shared import FEW_PROMPTS


def _base_reads(config: HubModel) -> dict[str, str]:
    template = config.chat_template or ""
    return {"model": config.model} | ({"chat_template": template} if template.endswith(".jinja") else {})


def _reward_models(config: RewardBaseConfig) -> dict[str, ModelRole]:
    return {"reward": frozen(config.frozen, None, rows=config.num_replies, data="data", scores_tokens=False)}


BASE = StageKind(
    "base",
    HubModel,
    NoInputs,
    Model,
    "xray_runtime.preparation.base:run",
    base_model=lambda config: config.model,
    outside=_base_reads,
    title="the pretrained model, the start of the lifecycle",
)

FRESH_BASE = StageKind(
    "fresh_base",
    FreshBase,
    FreshBaseInputs,
    Model,
    "xray_runtime.preparation.fresh_base:run",
    base_model=lambda config: config,
    title="a model with random weights, the start of the lifecycle",
)

REWARD_BASE = StageKind(
    "reward_base",
    RewardBaseConfig,
    RewardBaseInputs,
    RewardModel,
    "xray_runtime.preparation.reward_base:run",
    base_model=lambda config: config.model,
    models=_reward_models,
    outside=lambda config: {"model": config.model},
    shorten=lambda config: config.model_copy(update={"num_replies": min(config.num_replies, FEW_PROMPTS)}),
    results="reward.json",
    title=f"an imported reward model (its head is in `{REWARD_HEAD}`)",
)
