"""Declaration of the stage kind `distill`, which runs the loop of `ppo`."""

from __future__ import annotations

from collections.abc import Mapping

from xray_runtime.kernel.graph.artifacts import Model
from xray_runtime.kernel.graph.handles import Handle
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.methods.common.checks import FEW_STEPS, check_terms
from xray_runtime.methods.distill.config import DistillConfig
from xray_runtime.methods.ppo.kind import PPOInputs, check_policy_stage
from xray_runtime.methods.ppo.roles import ppo_models


def check_distill(config: DistillConfig, inputs: Mapping[str, Handle]) -> None:
    if config.rewards:
        check_terms(config, inputs)
    if "reference" in inputs and not config.has_reference:
        raise ValueError("reference: is not allowed with kl.coef = 0: nothing would read it")
    if config.resample_rounds and not config.rewards and config.environment is None:
        raise ValueError(
            f"resample_rounds = {config.resample_rounds} must be 0 without rewards: all replies would tie, and be "
            "sampled again for nothing"
        )
    if config.validation is not None and not config.rewards and not config.judges:
        raise ValueError("validation: is not allowed without rewards or judges, which would score it")
    check_policy_stage(config, inputs)


DISTILL = register(
    StageKind(
        "distill",
        DistillConfig,
        PPOInputs,
        Model,
        "xray_runtime.methods.ppo.body:run",
        models=ppo_models,
        check=check_distill,
        shorten=lambda config: config.model_copy(update={"iterations": FEW_STEPS}),
        panels=[
            ("KL to the teacher (nats a reply)", ["kl/teacher_k1", "kl/teacher_k3"]),
            ("replies that the teacher does not read", ["rollout/teacher_unread"]),
            ("reward", ["reward/mean"]),
            ("validation score", ["validation/score"]),
            ("entropy (nats a token)", ["policy/entropy"]),
            ("generator/trainer mismatch (nats a token)", ["rollout/mismatch", "rollout/mismatch_max"]),
            ("reply length (tokens)", ["rollout/length"]),
            ("seconds by phase", [f"seconds/{phase}" for phase in ("sync", "generate", "score", "update")]),
        ],
        headline={"kl/teacher_k1": "KL to the teacher"},
        title="a student after on-policy distillation",
    )
)
