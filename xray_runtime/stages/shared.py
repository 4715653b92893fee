"""What several stage kinds declare alike: their sources of reward, and the checks of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xray_runtime.config.best_of_n import GroupsConfig
from xray_runtime.config.evaluate import EvaluationConfig
from xray_runtime.config.ppo import JudgingConfig, PPOConfig
from xray_runtime.config.prepare import DataConfig
from xray_runtime.config.sft import SFTConfig
from xray_runtime.config.sources import BUILT_IN_GOLD
from xray_runtime.evaluation.judge_leakage import check_judges
from xray_runtime.graph.binding import dataset_config

FEW_STEPS = 2
FEW_PROMPTS = 16
"""How much is left of a stage that is shortened for the determinism check."""


ALL_PROMPTS = 1024
"""As many as a dataset is planned to have, where all its prompts are asked."""


def gold_functions(config: Any) -> list[str]:
    return [config.gold] if getattr(config, "gold", None) not in (None, BUILT_IN_GOLD) else []


def called_functions(config: Any) -> list[str]:
    terms = [*getattr(config, "rewards", []), *getattr(config, "judges", [])]
    environment = getattr(config, "environment", None)
    answering = [environment.path] if environment is not None else []
    return gold_functions(config) + answering + [term.function for term in terms if term.function is not None]


def num_samples(config: GroupsConfig) -> int:
    """Replies that are sampled; of a whole dataset as many as are at work at a time."""
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
        raise ValueError("rewards: one must have a weight other than 0: sources of weight 0 are only logged")
    check_terms(config, inputs)


def check_evaluation(config: EvaluationConfig, inputs: Mapping[str, Any]) -> None:
    check_terms(config, inputs)
    check_terms(config, inputs, "judges")
    check_judges(config, inputs)


def check_terms(config: JudgingConfig, inputs: Mapping[str, Any], where: str = "rewards") -> None:
    data = dataset_config(inputs)
    # What judges, a validation or an evaluation, has one reply to a prompt.
    groups = getattr(config, "samples_per_prompt", getattr(config, "samples", 1))
    replies = groups if where == "rewards" else 1
    for number, term in enumerate(getattr(config, where)):
        if term.compares and replies < 2:
            raise ValueError(
                f"{where}.{number}.judge.opponents: is not allowed where each prompt has a single reply: there is "
                "nothing to compare it with"
            )
        for role in term.roles:
            if role not in inputs:
                field = "model" if term.model is not None else "models"
                raise ValueError(f"{where}.{number}.{field}: {role!r} is not allowed: there is no such input")
        for field, column in term.columns.items():
            if data is not None and column not in data.columns:
                raise ValueError(
                    f"{where}.{number}.{field}: {column!r} is not allowed: the dataset carries "
                    f"{', '.join(data.columns) or 'no column'}; add it to data.columns"
                )


def check_validation(config: PPOConfig | SFTConfig, dataset: Any) -> None:
    data = dataset.call.config if dataset.call is not None else None
    if config.validation is not None and isinstance(data, DataConfig) and not data.validation_fraction:
        raise ValueError("validation: is not allowed: the dataset has no rows for it; set its validation_fraction")
