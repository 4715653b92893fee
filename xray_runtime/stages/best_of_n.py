"""Declaration of the stage kind `best_of_n`."""

from __future__ import annotations

from xray_runtime.config.best_of_n import BestOfNConfig
from xray_runtime.graph.artifacts import Dataset
from xray_runtime.graph.inputs import BestOfNInputs
from xray_runtime.graph.kind import StageKind, register
from xray_runtime.planning.roles import ModelRole
from xray_runtime.rl.model_roles import sampling_models
from xray_runtime.stages.shared import agent_reads, called_functions, check_rewards, fewer_prompts, num_samples


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
        "xray_runtime.rl.best_of_n:run",
        models=best_of_n_models,
        outside=agent_reads,
        functions=called_functions,
        check=check_rewards,
        shorten=fewer_prompts,
        results="stats.json",
        title="the best of several sampled replies to each prompt",
    )
)
