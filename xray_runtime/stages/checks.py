"""What a call of a stage kind must hold beside its fields' bounds: config and inputs together, before anything runs.

Each takes the config and the handles by role, and raises ValueError with one line that begins with the field.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xray_runtime.config.benchmark import PassAtKSuite
from xray_runtime.config.dpo import DPOConfig
from xray_runtime.config.evaluate import EvaluationConfig
from xray_runtime.config.kto import KTOConfig
from xray_runtime.config.lm_eval import LMEvalConfig
from xray_runtime.config.ppo import JudgingConfig, PPOConfig
from xray_runtime.config.preferences import (
    GoldPreferences,
    JudgedPreferences,
    RatingPreferences,
    RewardedPreferences,
)
from xray_runtime.config.prepare import DataConfig
from xray_runtime.config.sft import SFTConfig
from xray_runtime.rewards.functions import Arguments
from xray_runtime.stages.harness_files import read_tasks
from xray_runtime.stages.independence import check_judges


def check_rewards(config: JudgingConfig, inputs: Mapping[str, Any]) -> None:
    if getattr(config, "environment", None) is not None:
        _check_terms(config, inputs)
        return
    if not config.rewards:
        raise ValueError("rewards: must have at least 1 item: a reward model, a function or another source")
    if not any(term.weight for term in config.rewards):
        raise ValueError("rewards: one must have a weight other than 0: sources of weight 0 are only logged")
    _check_terms(config, inputs)


def check_evaluation(config: EvaluationConfig, inputs: Mapping[str, Any]) -> None:
    _check_terms(config, inputs)
    _check_terms(config, inputs, "judges")
    check_judges(config, inputs)


def _check_terms(config: JudgingConfig, inputs: Mapping[str, Any], where: str = "rewards") -> None:
    data = _dataset(inputs)
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


def check_functions(config: Any, inputs: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> None:
    """Functions that were handed over as sources of reward take prompts, replies and columns that the dataset has."""
    if not isinstance(config, JudgingConfig):
        return
    data = _dataset(inputs)
    for where in ("rewards", "judges"):
        for number, term in enumerate(getattr(config, where, ())):
            if term.function in functions:
                arguments = Arguments(functions[term.function], f"{where}.{number}.function {term.function!r}")
                if data is not None:
                    arguments.check(data.columns)


def _dataset(inputs: Mapping[str, Any]) -> DataConfig | None:
    """How the dataset whose prompts are asked is made; of a checkpoint nothing is known before it is opened."""
    handle = inputs.get("prompts", inputs.get("data"))
    config = handle.call.config if handle is not None and handle.call is not None else None
    return config if isinstance(config, DataConfig) else None


def check_ppo(config: PPOConfig, inputs: Mapping[str, Any]) -> None:
    check_rewards(config, inputs)
    _check_terms(config, inputs, "judges")
    if config.judges and config.validation is None:
        raise ValueError("judges: are not allowed without validation: they would not be used")
    _check_validation(config, inputs["prompts"])


def check_sft(config: SFTConfig, inputs: Mapping[str, Any]) -> None:
    _check_validation(config, inputs["data"])


def _check_validation(config: PPOConfig | SFTConfig, dataset: Any) -> None:
    data = dataset.call.config if dataset.call is not None else None
    if config.validation is not None and isinstance(data, DataConfig) and not data.validation_fraction:
        raise ValueError("validation: is not allowed: the dataset has no rows for it; set its validation_fraction")


def check_dpo(config: DPOConfig, inputs: Mapping[str, Any]) -> None:
    if not config.has_reference and "reference" in inputs:
        raise ValueError(f"reference: is not allowed with loss {config.loss!r}, which has none")


def check_kto(config: KTOConfig, inputs: Mapping[str, Any]) -> None:
    if not {"preferences", "verdicts"} & set(inputs):
        raise ValueError("preferences: is required, or verdicts")
    if "verdicts" in inputs and "data" not in inputs:
        raise ValueError("data: is required with verdicts: the dataset whose held-out prompts are not trained on")


def check_preferences(config: Any, inputs: Mapping[str, Any]) -> None:
    sampled = isinstance(config, GoldPreferences | RewardedPreferences)
    needed: tuple[str, ...] = ("policy", "data") if sampled else ()
    needed = ("data",) if isinstance(config, RatingPreferences) else needed
    needed = ("judgements",) if isinstance(config, JudgedPreferences) else needed
    for role in needed:
        if role not in inputs:
            raise ValueError(f"{role}: is required with source {config.source!r}")
    if isinstance(config, RewardedPreferences):
        check_rewards(config, inputs)


def check_benchmark(config: Any, inputs: Mapping[str, Any]) -> None:
    call = inputs["prompts"].call
    data = call.config if call is not None else None
    if isinstance(data, DataConfig) and config.split == "validation" and not data.validation_fraction:
        raise ValueError(
            "split: 'validation' is not allowed: the dataset has no such rows; set validation_fraction there"
        )
    column = config.verifier.column if isinstance(config, PassAtKSuite) else None
    if column is not None and isinstance(data, DataConfig) and column not in data.columns:
        raise ValueError(
            f"verifier.column: {column!r} is not allowed: the dataset carries "
            f"{', '.join(data.columns) or 'no column'}; add it to data.columns"
        )


def check_lm_eval(config: LMEvalConfig, inputs: Mapping[str, Any]) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("task: the package lm_eval is not installed: pip install 'xray-rlhf[lm-eval]'")
    directory = Path(config.task)
    # A graph may be written where its files are not.
    if directory.is_dir():
        read_tasks(directory, "task")
