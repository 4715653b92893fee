"""Declarations and checks that several stage kinds share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xray_runtime.kernel.config.sources import BUILT_IN_GOLD
from xray_runtime.kernel.graph.binding import dataset_config
from xray_runtime.methods.best_of_n.config import GroupsConfig
from xray_runtime.methods.common.environment import AgentConfig
from xray_runtime.methods.evaluate.config import EvaluationConfig
from xray_runtime.methods.evaluate.judge_leakage import check_judges
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.methods.prepare.config import DataConfig
from xray_runtime.methods.sft.config import SFTConfig
from xray_runtime.rewards.config import JudgingConfig

FEW_STEPS = 2
FEW_PROMPTS = 16
"""Size of a stage that is shortened for the determinism check."""


ALL_PROMPTS = 1024
"""Number of prompts to plan for if a stage uses all prompts of a dataset."""


def gold_functions(config: Any) -> list[str]:
    return [config.gold] if getattr(config, "gold", None) not in (None, BUILT_IN_GOLD) else []


def called_functions(config: Any) -> list[str]:
    terms = [*getattr(config, "rewards", []), *getattr(config, "judges", [])]
    environment = getattr(config, "environment", None)
    # An environment's class, or an agent's function, unless only a sandbox imports it.
    is_ours = not getattr(environment, "is_sandboxed", False)
    names = [getattr(environment, name, None) for name in ("path", "agent") if is_ours]
    names += [name for term in terms for name in term.functions]
    return gold_functions(config) + [name for name in names if name is not None]


def agent_reads(config: Any) -> dict[str, str]:
    """The directory of an agent in a sandbox."""
    directory = getattr(getattr(config, "environment", None), "directory", None)
    return {} if directory is None else {"environment.directory": directory}


def num_samples(config: GroupsConfig) -> int:
    """Number of sampled replies, for planning."""
    return config.samples * (config.num_prompts or ALL_PROMPTS)


def fewer_prompts(config: Any) -> Any:
    return config.model_copy(update={"num_prompts": min(config.num_prompts or FEW_PROMPTS, FEW_PROMPTS)})


def check_rewards(config: JudgingConfig, inputs: Mapping[str, Any]) -> None:
    if getattr(config, "environment", None) is not None:
        check_terms(config, inputs)
        return
    if not config.rewards:
        raise ValueError("rewards: must have at least 1 item: a reward model, a function or another source")
    if not any(term.weight for term in config.rewards):
        raise ValueError("rewards: at least one weight must not be 0: sources of weight 0 are only logged")
    check_terms(config, inputs)


def check_evaluation(config: EvaluationConfig, inputs: Mapping[str, Any]) -> None:
    check_terms(config, inputs)
    check_terms(config, inputs, "judges")
    check_judges(config, inputs)


def check_terms(config: JudgingConfig, inputs: Mapping[str, Any], where: str = "rewards") -> None:
    data = dataset_config(inputs)
    # Validations and evaluations sample one reply per prompt.
    groups = getattr(config, "samples_per_prompt", getattr(config, "samples", 1))
    is_agent = isinstance(getattr(config, "environment", None), AgentConfig)
    replies = groups if where == "rewards" else 1
    for number, term in enumerate(getattr(config, where)):
        if term.compares and replies < 2:
            raise ValueError(
                f"{where}.{number}.{term.field}: is not allowed with one reply per prompt: it compares several replies "
                "to a prompt"
            )
        for role in term.roles:
            if is_agent:
                raise ValueError(f"{where}.{number}: {role} is not allowed with an agent, whose episode has branches")
            if role not in inputs:
                raise ValueError(f"{where}.{number}.{term.field}: {role!r} is not allowed: there is no such input")
        for field, column in term.columns.items():
            if data is not None and column not in data.columns:
                raise ValueError(
                    f"{where}.{number}.{field}: {column!r} is not allowed: the dataset has "
                    f"{', '.join(data.columns) or 'no column'}; add it to data.columns"
                )


def check_validation(config: PPOConfig | SFTConfig, dataset: Any) -> None:
    data = dataset.call.config if dataset.call is not None else None
    if config.validation is not None and isinstance(data, DataConfig) and not data.validation_fraction:
        raise ValueError("validation: is not allowed: the dataset has no validation rows; set its validation_fraction")
