"""The model roles of stages that sample and score replies."""

from __future__ import annotations

from itertools import chain
from typing import Any

from xray_runtime.engines.roles import ModelRole, frozen, sampled
from xray_runtime.methods.best_of_n.config import GroupsConfig
from xray_runtime.methods.evaluate.config import EvaluationConfig
from xray_runtime.rewards.config import JudgingConfig


def scoring_models(config: JudgingConfig, *, trunk: str | None = None, **facts: Any) -> dict[str, ModelRole]:
    """The reward models among the sources of reward and the judges of `config`.

    Args:
        trunk: the trained role that may hold them as branches.
        facts: fields of `ModelRole` about the rows they score.
    """
    terms = chain.from_iterable(config.terms.values())
    trunks = {name: trunk if name.startswith("rewards.") else None for term in terms for name in term.roles}
    return {name: frozen(config.frozen, name, scores_tokens=False, trunk=of, **facts) for name, of in trunks.items()}


def sampling_models(
    config: GroupsConfig | EvaluationConfig, shape: str, data: str, *, rows: int, reply_tokens: int
) -> dict[str, ModelRole]:
    """The generator of `config`, and the reward models that score what it samples."""
    facts: dict[str, Any] = {"data": data, "rows": rows, "reply_tokens": reply_tokens}
    return {"generator": sampled(config.generator, shape, **facts), **scoring_models(config, **facts)}
