"""The models of a `ppo` stage: which there are, and their layouts."""

from __future__ import annotations

from typing import Any

from xray_runtime.engines.roles import ModelRole, frozen, sampled, trained
from xray_runtime.methods.common.sampling.model_roles import scoring_models
from xray_runtime.methods.ppo.config import PPOConfig


def ppo_models(config: PPOConfig) -> dict[str, ModelRole]:
    """All models of a `ppo` stage."""
    facts: dict[str, Any] = {"data": "prompts", "rows": config.rollout_size, "reply_tokens": config.max_response_tokens}
    whole = config.trainable_layers is None
    steps: dict[str, Any] = {"batch_size": config.minibatch_size, "epochs": config.epochs, **facts}
    # With a frozen trunk, the reference is a branch of the policy, and with adapters the policy without them.
    models = {
        "generator": sampled(
            config.generator,
            "policy",
            samples_ahead=config.lag > 0,
            kept_rollouts=_kept_rollouts(config),
            keeps_routes=config.routing == "replay" and config.ledger.tokens == "kept",
            kept_top_tokens=config.top_logprobs if config.score_centering and config.ledger.tokens == "kept" else 0,
            **facts,
        ),
        "policy": trained(config, "policy", branches=0 if whole else 1, **steps),
    }
    if whole and config.has_reference:
        itself = None if config.lora is None else "policy"
        models["reference"] = frozen(config.frozen, "policy", computed_by=itself, **facts)
    if config.distillation is not None:
        names = [f"teacher.{number}" for number in range(config.distillation.num_models)]
        models |= {name: frozen(config.frozen, name, **facts) for name in names}
    if getattr(config.environment, "champion_seats", ()):
        models["champion"] = sampled(config.generator, "champion", **facts)
    models |= scoring_models(config, trunk=None if whole else "policy", **facts)
    if config.critic_in_use == "separate":
        field = "engine" if config.critic_engine is None else "critic_engine"
        models["critic"] = trained(config, "policy", field=field, scores_tokens=False, **steps)
    return models


def _kept_rollouts(config: PPOConfig) -> int:
    """Rollouts in the ledger of a finished stage."""
    keep = config.ledger.keep
    if keep == "none":
        return 0
    return config.iterations if keep == "all" else min(keep, config.iterations)
