"""Declaration of the stage kind `ppo`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xray_runtime.kernel.graph.artifacts import VALUE_HEAD, Dataset, Model, RewardModel
from xray_runtime.kernel.graph.handles import Handle
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.common.checks import (
    FEW_STEPS,
    check_column,
    check_rewards,
    check_terms,
    check_validation,
)
from xray_runtime.methods.common.findings import policy_findings
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.methods.ppo.config_checks import check_champion, check_teachers
from xray_runtime.methods.ppo.roles import ppo_models
from xray_runtime.methods.ppo.routing import check_routed_policy


@dataclass(frozen=True)
class PPOInputs:
    policy: Model
    prompts: Dataset
    reference: Model | None = None
    """Reference of the KL penalty; the initial policy if absent."""
    rewards: list[RewardModel] = field(default_factory=list)
    judges: list[RewardModel] = field(default_factory=list)
    """Judges for `validation` only; the policy is not trained on their scores."""
    champion: Model | None = None
    """Plays `environment.champion_seats` and learns nothing."""
    teacher: list[Model] = field(default_factory=list)
    """The teacher of `distillation`; several, if its `column` says which one a row has."""


def check_ppo(config: PPOConfig, inputs: Mapping[str, Handle]) -> None:
    check_rewards(config, inputs)
    check_policy_stage(config, inputs)


def check_policy_stage(config: PPOConfig, inputs: Mapping[str, Handle]) -> None:
    """The checks of a stage that may have no rewards."""
    check_terms(config, inputs, "judges")
    if config.judges and config.validation is None:
        raise ValueError("judges: are not allowed without validation: they would not be used")
    check_validation(config, inputs["prompts"])
    check_routed_policy(config.routing, inputs["policy"])
    check_teachers(config, inputs)
    check_champion(config, inputs)
    for section, names in {"distillation": ("column", "demonstration"), "curriculum": ("column",)}.items():
        for name in names:
            check_column(inputs, f"{section}.{name}", getattr(getattr(config, section), name, None))


PPO = register(
    StageKind(
        "ppo",
        PPOConfig,
        PPOInputs,
        Model,
        "xray_runtime.methods.ppo.body:run",
        models=ppo_models,
        check=check_ppo,
        shorten=lambda config: config.model_copy(update={"iterations": FEW_STEPS}),
        panels=[
            ("reward", ["reward/mean"]),
            ("gold score", ["reward/gold"]),
            ("validation score", ["validation/score"]),
            ("KL to the reference (nats a reply)", ["kl/reference_k1", "kl/reference_k3"]),
            ("entropy (nats a token)", ["policy/entropy"]),
            ("share of clipped tokens", ["policy/clip_fraction", "value/clip_fraction"]),
            ("explained variance", ["value/explained_variance"]),
            ("generator/trainer mismatch (nats a token)", ["rollout/mismatch", "rollout/mismatch_max"]),
            ("reply length (tokens)", ["rollout/length"]),
            ("seconds by phase", [f"seconds/{phase}" for phase in ("sync", "generate", "score", "update")]),
        ],
        headline={"reward/mean": "reward", "kl/reference_k1": "KL"},
        findings=policy_findings,
        title=f"a policy after PPO (a value head, if any, is in `{VALUE_HEAD}`)",
    )
)
