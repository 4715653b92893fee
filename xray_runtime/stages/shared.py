"""Declarations and checks that several stage kinds share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xray_runtime.config.environment import AgentConfig
from xray_runtime.config.ppo import JudgingConfig, PPOConfig
from xray_runtime.config.sft import SFTConfig
from xray_runtime.config.sources import BUILT_IN_GOLD
from xray_runtime.graph.binding import dataset_config

FEW_PROMPTS = 16
"""Size of a stage that is shortened for the determinism check."""


def called_functions(config: Any) -> list[str]:
    environment = getattr(config, "environment", None)
    # An environment's class, or an agent's function, unless only a sandbox imports it.
    is_ours = not getattr(environment, "is_sandboxed", False)
    gold = getattr(config, "gold", None)
    names = [None if gold == BUILT_IN_GOLD else gold]
    names += [getattr(environment, name, None) for name in ("path", "agent") if is_ours]
    names += [term.function for term in [*getattr(config, "rewards", []), *getattr(config, "judges", [])]]
    return [name for name in names if name is not None]


def agent_reads(config: Any) -> dict[str, str]:
    """The directory of an agent in a sandbox."""
    directory = getattr(getattr(config, "environment", None), "directory", None)
    return {} if directory is None else {"environment.directory": directory}


def fewer_prompts(config: Any) -> Any:
    return config.model_copy(update={"num_prompts": min(config.num_prompts or FEW_PROMPTS, FEW_PROMPTS)})


def check_rewards(config: JudgingConfig, inputs: Mapping[str, Any]) -> None:
    if getattr(config, "environment", None) is None:
        if not config.rewards:
            raise ValueError("rewards: must have at least 1 item: a reward model, a function or another source")
        if not any(term.weight for term in config.rewards):
            raise ValueError("rewards: at least one weight must not be 0: sources of weight 0 are only logged")
    check_terms(config, inputs)


def check_terms(config: JudgingConfig, inputs: Mapping[str, Any], where: str = "rewards") -> None:
    # Validations and evaluations sample one reply per prompt.
    groups = getattr(config, "samples_per_prompt", getattr(config, "samples", 1))
    is_agent = isinstance(getattr(config, "environment", None), AgentConfig)
    replies = groups if where == "rewards" else 1
    for number, term in enumerate(getattr(config, where)):
        if term.compares and replies < 2:
            raise ValueError(
                f"{where}.{number}.judge.opponents: is not allowed with one reply per prompt: the judge compares "
                "several replies to a prompt"
            )
        for role in term.roles:
            if is_agent:
                raise ValueError(f"{where}.{number}: {role} is not allowed with an agent, whose episode has branches")
            if role not in inputs:
                field = "model" if term.model is not None else "models"
                raise ValueError(f"{where}.{number}.{field}: {role!r} is not allowed: there is no such input")
        for field, column in term.columns.items():
            check_column(f"{where}.{number}.{field}", column, inputs)


def check_column(field: str, column: str, inputs: Mapping[str, Any]) -> None:
    data = dataset_config(inputs)
    if data is not None and column not in data.columns:
        raise ValueError(
            f"{field}: {column!r} is not allowed: the dataset has {', '.join(data.columns) or 'no column'}; "
            "add it to data.columns"
        )


def check_validation(config: PPOConfig | SFTConfig, inputs: Mapping[str, Any]) -> None:
    if config.validation is not None:
        check_validation_rows("validation:", inputs)


def check_validation_rows(field: str, inputs: Mapping[str, Any]) -> None:
    data = dataset_config(inputs)
    if data is not None and not data.validation_fraction:
        raise ValueError(f"{field} is not allowed: the dataset has no validation rows; set its validation_fraction")
