"""The models that a stage kind declares: the only input of the planner, `parallel: auto` and the resource check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from xray_runtime.engines.layouts import TRAINERS, EngineConfig, FrozenConfig, GeneratorConfig, LayoutConfig
from xray_runtime.engines.training_config import TrainingConfig
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.handles import Call
from xray_runtime.kernel.plugs import able, unsupported
from xray_runtime.models.lora import LoRAConfig

Use = Literal["trained", "frozen", "sampled"]
ALL_USES: tuple[Use, ...] = get_args(Use)
CHOSEN = (
    *("num_workhorses", "zero_stage", "tensor_parallel", "pipeline_parallel", "sequence_parallel", "expert_parallel"),
)
"""The fields of a layout that `auto` chooses."""


@dataclass(frozen=True, kw_only=True)
class ModelRole:
    """One model of a stage. All models of a stage are open at the same time."""

    use: Use
    layout: LayoutConfig | GeneratorConfig
    """Its layout in the stage's config."""
    field: str
    """Dotted path of `layout` in the stage's config; the planner writes its choice there."""
    shape: str | None
    """The input that has its shape. None: the kind's own `base_model`."""
    data: str | None = None
    """The input whose rows it processes: its config limits the length of prompts, and of replies without
    `reply_tokens`."""
    reply_tokens: int | None = None
    """The longest reply, in tokens."""
    rows: int = 1
    """Number of rows in one request, such as a rollout."""
    batch_size: int = 1
    """Rows of one optimizer step: the most data-parallel ranks that a trained model can use."""
    epochs: int = 1
    """Passes over the rows of one request."""
    sequences_per_row: int = 1
    """2 if a row is a pair of replies."""
    samples_ahead: bool = False
    """Whether it samples the next rollout while the other models score one and learn from it."""
    kept_rollouts: int = 0
    """Rollouts of a sampled model that the stage keeps in its checkpoint."""
    keeps_routes: bool = False
    """Whether the experts of each token are kept with them."""
    kept_top_tokens: int = 0
    """How many of the likeliest tokens at each place are kept with them."""
    scores_tokens: bool = True
    """True if it computes logits; a critic or reward model computes one number instead."""
    trainable_layers: int | None = None
    lora: LoRAConfig | None = None
    branches: int = 0
    """Number of frozen models that are branches of its trunk."""
    computed_by: str | None = None
    """The trained role that computes its scores with its adapters off, unless the stage has an input of this role's
    name that is another model than `shape`."""
    trunk: str | None = None
    """The trained role whose branch it becomes if both have the same base and trained layers."""

    def check_left_open(self, stage: str) -> None:
        if isinstance(self.layout, EngineConfig) and self.layout.capabilities.sharding is None:
            feature = f"{self.field}.library = {self.layout.library!r}"
            where, others = "runtime.parallel = 'auto'", able(TRAINERS, "sharding")
            raise ConfigError(f"{stage}.{unsupported(feature, where, others)}")
        for field, info in type(self.layout).model_fields.items():
            value = getattr(self.layout, field)
            if field in CHOSEN and value != info.default:
                raise ConfigError(
                    f"{stage}.{self.field}.{field}: {value} is not allowed with runtime.parallel 'auto', which chooses "
                    "it: leave it out"
                )


def models_of(call: Call) -> dict[str, ModelRole]:
    """The models that a stage opens, by name. Raises TypeError as `all_models`."""

    def is_opened(name: str, role: ModelRole) -> bool:
        start = call.parents.get(role.shape or "")
        return role.computed_by is None or call.parents.get(name, start) is not start

    return {name: role for name, role in all_models(call).items() if is_opened(name, role)}


def all_models(call: Call) -> dict[str, ModelRole]:
    """The models of a stage by name, also those that another computes. Raises TypeError: its kind declares something
    else."""
    roles: dict[str, ModelRole] = {}
    for name, role in call.kind.models(call.config).items():
        if not isinstance(role, ModelRole):
            raise TypeError(f"{call.name}: the model {name!r} of its kind is {role!r}, and not a ModelRole")
        roles[name] = role
    return roles


def shape_input(call: Call) -> str | None:
    """The input that has the shape of a stage's output; None if it is the kind's own base model."""
    if call.kind.base_model(call.config) is not None:
        return None
    trained = (role.shape for role in models_of(call).values() if role.use == "trained")
    models = (name for name, handle in call.parents.items() if handle.call is None or handle.output.is_model)
    return next(trained, None) or next(models, None)


def trained(config: TrainingConfig, shape: str, *, batch_size: int, field: str = "engine", **facts: Any) -> ModelRole:
    """A model that `config` trains; `field` is the name of its engine field."""
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
    """A model that only scores, with the layout in the field `frozen`."""
    return ModelRole(use="frozen", layout=layout, field="frozen", shape=shape, **facts)


def sampled(layout: GeneratorConfig, shape: str, **facts: Any) -> ModelRole:
    """A model to sample from, with the layout in the field `generator`."""
    return ModelRole(use="sampled", layout=layout, field="generator", shape=shape, **facts)
