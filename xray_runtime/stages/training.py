"""Declarations of the stage kinds that train a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xray_runtime.config.dpo import DPOConfig
from xray_runtime.config.kto import KTOConfig
from xray_runtime.config.ppo import PPOConfig
from xray_runtime.config.reward_model import RewardConfig
from xray_runtime.config.sft import SFTConfig
from xray_runtime.config.sources import is_function
from xray_runtime.graph.artifacts import REWARD_HEAD, VALUE_HEAD, Model, RewardModel
from xray_runtime.graph.inputs import DPOInputs, KTOInputs, PPOInputs, RewardModelInputs, SFTInputs
from xray_runtime.graph.kind import StageKind
from xray_runtime.planning.roles import ModelRole, trained
from xray_runtime.rl.model_roles import ppo_models
from xray_runtime.stages.findings import policy_findings, sft_findings
from xray_runtime.stages.shared import agent_reads, called_functions, check_rewards, check_terms, check_validation

FEW_STEPS = 2
"""Length of a stage that is shortened for the determinism check."""


def _sft_models(config: SFTConfig) -> dict[str, ModelRole]:
    seen: dict[str, Any] = {"data": "data", "reply_tokens": config.max_response_tokens}
    return {"policy": trained(config, "base", batch_size=config.batch_size, **seen)}


def _reward_models(config: RewardConfig) -> dict[str, ModelRole]:
    pairs: dict[str, Any] = {"batch_size": config.batch_size, "data": "data", "sequences_per_row": 2}
    return {"reward": trained(config, "policy", scores_tokens=False, **pairs)}


def _dpo_models(config: DPOConfig) -> dict[str, ModelRole]:
    return {"policy": trained(config, "policy", batch_size=config.batch_size, data="preferences", sequences_per_row=2)}


def _check_dpo(config: DPOConfig, inputs: Mapping[str, Any]) -> None:
    if not config.has_reference and "reference" in inputs:
        raise ValueError(f"reference: is not allowed with loss {config.loss!r}, which does not use one")


def _check_kto(config: KTOConfig, inputs: Mapping[str, Any]) -> None:
    if not {"preferences", "verdicts"} & set(inputs):
        raise ValueError("preferences: is required unless verdicts are given")
    if "verdicts" in inputs and "data" not in inputs:
        raise ValueError("data: is required with verdicts: the stage does not train on the dataset's held-out prompts")


def _ppo_functions(config: PPOConfig) -> list[str]:
    return called_functions(config) + [name for name in (config.advantages, config.loss) if is_function(name)]


def _check_ppo(config: PPOConfig, inputs: Mapping[str, Any]) -> None:
    check_rewards(config, inputs)
    check_terms(config, inputs, "judges")
    if config.judges and config.validation is None:
        raise ValueError("judges: are not allowed without validation: they would not be used")
    check_validation(config, inputs)


def _one_epoch(config: Any) -> Any:
    return config.model_copy(update={"epochs": 1})


SFT = StageKind(
    "sft",
    SFTConfig,
    SFTInputs,
    Model,
    "xray_runtime.training.sft:run",
    models=_sft_models,
    check=check_validation,
    shorten=lambda config: config.model_copy(update={"steps": FEW_STEPS}),
    panels=[
        ("loss (nats a token)", ["sft/loss", "sft/heldout_loss", "sft/validation_loss"]),
        ("gradient norm", ["sft/grad_norm"]),
        ("tokens a second", ["speed/train_tokens_per_s"]),
    ],
    headline={"sft/loss": "loss"},
    findings=sft_findings,
    title="supervised fine-tuning on human replies",
)

REWARD_MODEL = StageKind(
    "reward_model",
    RewardConfig,
    RewardModelInputs,
    RewardModel,
    "xray_runtime.training.reward_model:run",
    models=_reward_models,
    shorten=_one_epoch,
    panels=[
        ("loss", ["reward_model/loss"]),
        (
            "pairs in the right order",
            ["reward_model/accuracy", "reward_model/heldout_accuracy", "reward_model/length_baseline_accuracy"],
        ),
        ("gradient norm", ["reward_model/grad_norm"]),
    ],
    headline={"reward_model/loss": "loss", "accuracy": "held-out accuracy"},
    results="reward.json",
    title=f"a reward model (its head is in `{REWARD_HEAD}`)",
)

DPO = StageKind(
    "dpo",
    DPOConfig,
    DPOInputs,
    Model,
    "xray_runtime.training.dpo:run",
    models=_dpo_models,
    check=_check_dpo,
    shorten=_one_epoch,
    panels=[
        ("loss", ["dpo/loss", "dpo/heldout_loss", "dpo/validation_loss"]),
        ("pairs in the right order", ["dpo/accuracy", "dpo/heldout_accuracy"]),
        ("margin of implicit rewards", ["dpo/margin", "dpo/heldout_margin"]),
        ("log-probability (nats a reply)", ["dpo/chosen_logprobs", "dpo/rejected_logprobs"]),
        ("gradient norm", ["dpo/grad_norm"]),
    ],
    headline={"dpo/loss": "loss", "dpo/heldout_accuracy": "held-out accuracy"},
    title="a policy after learning from preference pairs",
)

KTO = StageKind(
    "kto",
    KTOConfig,
    KTOInputs,
    Model,
    "xray_runtime.training.kto:run",
    models=lambda config: {"policy": trained(config, "policy", batch_size=config.batch_size, data="preferences")},
    check=_check_kto,
    shorten=_one_epoch,
    panels=[
        ("loss", ["kto/loss", "kto/validation_loss"]),
        ("implicit rewards", ["kto/desirable_reward", "kto/undesirable_reward"]),
        ("z, KL to the reference (nats a reply)", ["kto/baseline"]),
        ("held-out pairs in the right order", ["kto/heldout_accuracy"]),
        ("gradient norm", ["kto/grad_norm"]),
    ],
    headline={"kto/loss": "loss", "kto/heldout_accuracy": "held-out accuracy"},
    title="a policy after learning from desirable and undesirable replies",
)

PPO = StageKind(
    "ppo",
    PPOConfig,
    PPOInputs,
    Model,
    "xray_runtime.rl.ppo:run",
    models=ppo_models,
    outside=agent_reads,
    functions=_ppo_functions,
    check=_check_ppo,
    shorten=lambda config: config.model_copy(update={"iterations": FEW_STEPS}),
    panels=[
        ("reward", ["reward/mean"]),
        ("gold score", ["reward/gold"]),
        ("validation score", ["validation/score"]),
        ("KL to the reference (nats a reply)", ["kl/reference_k1", "kl/reference_k3"]),
        ("entropy (nats a token)", ["policy/entropy"]),
        ("clip fractions", ["policy/clip_fraction", "value/clip_fraction"]),
        ("explained variance", ["value/explained_variance"]),
        ("generator/trainer mismatch (nats)", ["rollout/mismatch", "rollout/mismatch_max"]),
        ("reply length (tokens)", ["rollout/length"]),
        ("seconds by phase", [f"seconds/{phase}" for phase in ("sync", "generate", "score", "update")]),
    ],
    headline={"reward/mean": "reward", "kl/reference_k1": "KL"},
    findings=policy_findings,
    title=f"a policy after PPO (a value head, if any, is in `{VALUE_HEAD}`)",
)
