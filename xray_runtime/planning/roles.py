"""What a stage kind says of its models: all that the planner, `parallel: auto` and the demand on a cluster read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from xray_runtime.config.engines import FrozenConfig, GeneratorConfig, LayoutConfig, LoRAConfig, TrainingConfig

Use = Literal["trained", "frozen", "sampled"]
CHOSEN = ("library", "num_workhorses", "zero_stage", "tensor_parallel", "pipeline_parallel")
"""The fields of a layout that `auto` chooses."""


@dataclass(frozen=True, kw_only=True)
class ModelRole:
    """One model of a stage. All models of a stage are alive at the same time."""

    use: Use
    layout: LayoutConfig | GeneratorConfig
    """How it is spread, as the stage's config says."""
    field: str
    """Dotted path of `layout` in the stage's config, where the planner writes what it chooses."""
    shape: str | None
    """The input it is made from. None: the kind's own `base_model`."""
    data: str | None = None
    """The input whose rows it sees: what prepared them bounds their prompts, and replies without `reply_tokens`."""
    reply_tokens: int | None = None
    """Most tokens that may follow a prompt."""
    rows: int = 1
    """Rows that it is given at a time, of a rollout for example."""
    batch_size: int = 1
    """Rows of one optimizer step, of a trained model: it can use as many data-parallel ranks."""
    scores_tokens: bool = True
    """Log-probabilities of tokens are wanted, so logits are made; a critic or reward model has one number instead."""
    trainable_layers: int | None = None
    lora: LoRAConfig | None = None
    branches: int = 0
    """So many frozen models stand on its trunk."""
    trunk: str | None = None
    """The trained role that holds it as a branch, where both come from the same base by the same trained layers."""


def trained(config: TrainingConfig, shape: str, *, batch_size: int, field: str = "engine", **facts: Any) -> ModelRole:
    """A model that `config` trains; `field` names the engine in it."""
    layers, engine = config.trainable_layers, getattr(config, field)
    rows = facts.pop("rows", batch_size)
    return ModelRole(
        use="trained",
        layout=engine,
        field=field,
        shape=shape,
        batch_size=batch_size,
        rows=rows,
        trainable_layers=layers,
        lora=config.lora,
        **facts,
    )


def frozen(layout: FrozenConfig, shape: str | None, **facts: Any) -> ModelRole:
    """A model that only scores, spread as the field `frozen` says."""
    return ModelRole(use="frozen", layout=layout, field="frozen", shape=shape, **facts)


def sampled(layout: GeneratorConfig, shape: str, **facts: Any) -> ModelRole:
    """A model that replies are sampled from, spread as the field `generator` says."""
    return ModelRole(use="sampled", layout=layout, field="generator", shape=shape, **facts)
