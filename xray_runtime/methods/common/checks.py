"""Declarations and checks that several stage kinds share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.kernel.graph.handles import Handle
from xray_runtime.methods.best_of_n.config import GroupsConfig
from xray_runtime.methods.common.environment import AgentConfig, environment_of
from xray_runtime.methods.evaluate.config import EvaluationConfig
from xray_runtime.methods.evaluate.judge_leakage import check_judges
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.methods.prepare.config import DataConfig
from xray_runtime.methods.sft.config import SFTConfig
from xray_runtime.rewards.config import JudgingConfig

FEW_STEPS = 2
FEW_PROMPTS = 16
"""Size of a stage that is shortened for the determinism check."""


Sampled = TypeVar("Sampled", bound=GroupsConfig | EvaluationConfig)

ALL_PROMPTS = 1024
"""Number of prompts to plan for if a stage uses all prompts of a dataset."""


def dataset_config(inputs: Mapping[str, Handle]) -> DataConfig | None:
    """The config of the dataset that supplies prompts; None if it is an existing checkpoint."""
    handle = inputs.get("prompts", inputs.get("data"))
    config = handle.call.config if handle is not None and handle.call is not None else None
    return config if isinstance(config, DataConfig) else None


def num_samples(config: GroupsConfig) -> int:
    """Number of sampled replies, for planning."""
    return config.samples * (config.num_prompts or ALL_PROMPTS)


def fewer_prompts(config: Sampled) -> Sampled:
    return cast(
        "Sampled", config.model_copy(update={"num_prompts": min(config.num_prompts or FEW_PROMPTS, FEW_PROMPTS)})
    )


def check_rewards(config: JudgingConfig, inputs: Mapping[str, Handle]) -> None:
    if environment_of(config) is not None:
        check_terms(config, inputs)
        return
    if not config.rewards:
        raise ValueError("rewards: must have at least 1 item: a reward model, a function or another source")
    if not any(term.weight for term in config.rewards):
        raise ValueError("rewards: at least one weight must not be 0: sources of weight 0 are only logged")
    check_terms(config, inputs)


def check_evaluation(config: EvaluationConfig, inputs: Mapping[str, Handle]) -> None:
    check_terms(config, inputs)
    check_terms(config, inputs, "judges")
    check_judges(config, inputs)
    check_column(inputs, "tag_column", config.tag_column)


def check_column(inputs: Mapping[str, Handle], field: str, column: str | None) -> None:
    """Raises ValueError if the dataset is known to lack the column."""
    data = dataset_config(inputs)
    if column is not None and data is not None and column not in data.columns:
        has = ", ".join(data.columns) or "no column"
        raise ValueError(f"{field}: {column!r} is not allowed: the dataset has {has}; add it to data.columns")


def check_terms(config: JudgingConfig, inputs: Mapping[str, Handle], where: str = "rewards") -> None:
    data = dataset_config(inputs)
    generator = getattr(config, "generator", None)
    if data is not None and data.pictures is not None and isinstance(generator, GeneratorConfig):
        # Pictures that are no paths are found as the stage begins.
        generator.require("pictures", f"data.pictures = {data.pictures!r}", "generator")
    is_agent = isinstance(environment_of(config), AgentConfig)
    # Validations and evaluations sample one reply per prompt.
    replies = config.replies_per_prompt if where == "rewards" else 1
    for number, term in enumerate(config.terms[where]):
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
            check_column(inputs, f"{where}.{number}.{field}", column)


def check_validation(config: PPOConfig | SFTConfig, dataset: Handle) -> None:
    data = dataset.call.config if dataset.call is not None else None
    if config.validation is not None and isinstance(data, DataConfig) and not data.validation_fraction:
        raise ValueError("validation: is not allowed: the dataset has no validation rows; set its validation_fraction")
