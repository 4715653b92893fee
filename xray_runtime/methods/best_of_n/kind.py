"""Declaration of the stage kind `best_of_n`."""

from __future__ import annotations

from dataclasses import dataclass, field

from xray_runtime.engines.roles import ModelRole
from xray_runtime.kernel.graph.artifacts import Dataset, Model, RewardModel
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.best_of_n.config import BestOfNConfig
from xray_runtime.methods.common.checks import check_rewards, fewer_prompts, num_samples
from xray_runtime.methods.common.sampling.model_roles import sampling_models


@dataclass(frozen=True)
class BestOfNInputs:
    policy: Model
    prompts: Dataset
    rewards: list[RewardModel] = field(default_factory=list)


def best_of_n_models(config: BestOfNConfig) -> dict[str, ModelRole]:
    return sampling_models(
        config, "policy", "prompts", rows=num_samples(config), reply_tokens=config.max_response_tokens
    )


BEST_OF_N = register(
    StageKind(
        "best_of_n",
        BestOfNConfig,
        BestOfNInputs,
        Dataset,
        "xray_runtime.methods.best_of_n.body:run",
        models=best_of_n_models,
        check=check_rewards,
        shorten=fewer_prompts,
        results="stats.json",
        title="the best of several sampled replies to each prompt",
    )
)
