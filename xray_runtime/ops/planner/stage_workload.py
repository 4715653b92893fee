"""The models of a stage as a workload; each gets its shape by following the stage's inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from xray_runtime.cluster.pool.machine import GIB
from xray_runtime.engines.layouts import EngineConfig, GeneratorConfig
from xray_runtime.engines.roles import ModelRole, all_models, models_of, shape_input
from xray_runtime.kernel.config.section import sections
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.methods.prepare.config import PROMPT_TOKENS
from xray_runtime.methods.sft.config import REPLY_TOKENS
from xray_runtime.models.config import FreshBase, PretrainedBase
from xray_runtime.models.family import family_of
from xray_runtime.models.pretrained_shapes import from_pretrained
from xray_runtime.models.shapes import ModelShape, from_fresh
from xray_runtime.ops.planner.memory import PLAIN
from xray_runtime.ops.planner.model_states import FLOAT32_BYTES, HALF_BYTES
from xray_runtime.ops.planner.workload import OpenChoice, PlannedRole, Workload, training_options

if TYPE_CHECKING:
    from xray_runtime.kernel.graph.graph import StageCall
    from xray_runtime.kernel.graph.handles import Call, Handle


def stage_workload(call: StageCall, device: str) -> Workload | None:
    """The workload of a stage; None if it has no models.

    vLLM generates in bfloat16 on CUDA.

    Raises:
        ConfigError: a model's shape cannot be found, read or planned.
    """
    declared = models_of(call)
    on_trunks = [name for name, role in declared.items() if _is_branch(call, role, declared)]
    branches = Counter(declared[name].trunk for name in on_trunks)
    kept = {
        name: role
        for name, role in declared.items()
        if name not in on_trunks and not (isinstance(role.layout, GeneratorConfig) and role.layout.capabilities.remote)
    }
    if not kept:
        return None
    computed = Counter(role.computed_by for name, role in all_models(call).items() if name not in declared)
    roles = tuple(_planned(call, name, role, branches[name], computed[name], device) for name, role in kept.items())
    lengths = [
        _lengths(call, role, planned.shape.max_positions) for role, planned in zip(kept.values(), roles, strict=True)
    ]
    engines = [role.layout for role in kept.values() if isinstance(role.layout, EngineConfig)]
    return Workload(
        roles=roles,
        sequence_tokens=max(sum(length) for length in lengths),
        response_tokens=max(response for _, response in lengths),
        batch_size=min((role.batch_size for role in kept.values() if role.use == "trained"), default=1),
        rollout_size=max(role.rows for role in kept.values()),
        micro_batch_tokens=max((engine.micro_batch_tokens for engine in engines), default=16),
        reserved_kv_bytes=round(call.runtime.generator_memory_gib * GIB) if device == "cpu" else 0,
        generator_replicas=call.runtime.generator_replicas,
        generator_sleeps=call.runtime.generator_sleeps,
        trainer_sleeps=call.runtime.trainer_sleeps,
        samples_ahead=any(role.samples_ahead for role in kept.values()),
        device="cpu" if device == "cpu" else "cuda",
        through_host=call.runtime.weight_transfer == "plasma",
        open_choices=frozenset(_open_choices(call, engines)) if device != "cpu" else frozenset(),
    )


def _open_choices(call: StageCall, engines: list[EngineConfig]) -> Iterator[OpenChoice]:
    """Choices that the config leaves at their defaults."""
    runtime, defaults = call.runtime, type(call.runtime).model_fields
    roles = models_of(call).values()
    sleeps = all(r.layout.capabilities.sleep for r in roles if isinstance(r.layout, GeneratorConfig))
    if all(engine.micro_batch_tokens == EngineConfig().micro_batch_tokens for engine in engines):
        yield "micro_batch_tokens"
    if runtime.generator_replicas == defaults["generator_replicas"].default:
        yield "generator_replicas"
    if sleeps and not runtime.generator_sleeps and not runtime.trainer_sleeps and _may_sleep(call):
        yield "sleep"
    if all(engine.capabilities.offload and not engine.offloads("cuda") for engine in engines):
        yield "offload"


def _may_sleep(call: StageCall) -> bool:
    """Whether generator and trained models may take turns."""
    runtime = call.runtime.model_copy(update={"generator_sleeps": True})
    try:
        for path, part in sections(call.config):
            part.check_runtime(runtime, path)
    except ValueError:
        return False
    return True


def _planned(call: StageCall, name: str, role: ModelRole, branches: int, computes: int, device: str) -> PlannedRole:
    where, layout = f"{call.name}.{name}", role.layout
    source, field = _source(call, role, where)
    shape = from_fresh(source) if isinstance(source, FreshBase) else _pretrained_shape(source, field)
    if role.trainable_layers is not None and role.trainable_layers > shape.num_layers:
        raise ConfigError(
            f"{call.name}.trainable_layers: {role.trainable_layers} is not allowed: the model has {shape.num_layers} "
            "layers"
        )
    width, options = FLOAT32_BYTES, PLAIN
    if isinstance(layout, EngineConfig):
        width, options = training_options(role.lora, layout, device)
    elif isinstance(layout, GeneratorConfig):
        width = FLOAT32_BYTES if device == "cpu" else HALF_BYTES
    elif getattr(layout.resolved(device), "precision", "float32") == "bfloat16":
        width = HALF_BYTES
    return PlannedRole(
        name=name,
        shape=shape,
        use=role.use,
        weight_bytes=width,
        scores_tokens=role.scores_tokens,
        top_layers=role.trainable_layers,
        branches=role.branches + branches,
        scored_passes=1 + computes,
        options=options,
        in_one_piece=isinstance(layout, GeneratorConfig) and not layout.capabilities.tensor_parallel,
        library=getattr(layout, "library", EngineConfig.default),
        model=None if isinstance(source, FreshBase) or family_of(shape.family).beyond is not None else source,
        epochs=role.epochs,
        sequences_per_row=role.sequences_per_row,
        kept_rollouts=role.kept_rollouts,
        keeps_routes=role.keeps_routes,
        kept_top_tokens=role.kept_top_tokens,
    )


class UnknownShapeError(ConfigError):
    """The shape of a model is unknown, because its checkpoint is on another machine."""


def _source(call: StageCall, role: ModelRole, where: str) -> tuple[FreshBase | str, str]:
    """`base_of` a role; a frozen model with an unknown shape is assumed to have the shape of the other models."""
    try:
        return base_of(call, role.shape, where)
    except UnknownShapeError:
        others = [other.shape for other in models_of(call).values() if other.use != "frozen"]
        if role.use != "frozen" or not others:
            raise
        return base_of(call, others[0], where)


def base_of(call: Call, name: str | None, where: str) -> tuple[FreshBase | str, str]:
    """(base model of an input, or of the stage itself if `name` is None, as sizes, name or directory; the field that
    names it).

    Raises:
        ConfigError: the shape is unknown; the line begins with `where`.
    """
    while name is not None:
        handle = call.parents.get(name)
        if handle is None:
            raise ConfigError(
                f"{where}: cannot be planned: the stage has no input {name!r}, which has the model's shape"
            )
        if handle.call is None:
            directory = handle.graph.directory_of(handle)
            if not (directory / "config.json").is_file():
                raise UnknownShapeError(
                    f"{where}: {handle.name!r} cannot be planned: must be a checkpoint's directory with a config.json"
                )
            return str(directory), where
        call, name = handle.call, shape_input(handle.call)
    base = call.kind.base_model(call.config)
    if base is None:
        raise ConfigError(f"{where}: cannot be planned: {call.name!r} has no input model with a known shape")
    assert isinstance(base, FreshBase | str)
    return base, f"{call.name}.model"


def _is_branch(call: StageCall, role: ModelRole, declared: dict[str, ModelRole]) -> bool:
    """Whether a frozen model becomes a branch of another model's trunk."""
    trunk = declared.get(role.trunk or "")
    made = call.parents[role.shape].call if trunk is not None and role.shape is not None else None
    if trunk is None or made is None or made.kind.base_model(made.config) is not None:
        return False
    layers = {other.trainable_layers for other in models_of(made).values() if other.use == "trained"}
    return layers == {trunk.trainable_layers} and (
        base_of(call, role.shape, call.name) == base_of(call, trunk.shape, call.name)
    )


def _lengths(call: StageCall, role: ModelRole, context: int | None) -> tuple[int, int]:
    """(longest prompt, longest reply) in tokens, from the config of the data, or else what the model's `context` leaves
    where it is known, as stages have it (`methods.common.training.dataset`)."""
    data = call.parents.get(role.data or "")
    reply = role.reply_tokens or next(_settings(data, "max_new_tokens"), None)
    prompt = next(_settings(data, "max_prompt_tokens"), None)
    if context is None:
        return prompt or PROMPT_TOKENS, reply or REPLY_TOKENS
    reply = min(reply or min(REPLY_TOKENS, context // 3), max(context - 1, 1))
    return min(prompt or context, context - reply), reply


def _settings(data: Handle | None, field: str) -> Iterator[Any]:
    """The values of a field in the configs of the stages that made `data`, nearest first."""
    handles = [data] if data is not None else []
    for handle in handles:
        if handle.call is None or handle.output.is_model:
            continue
        value = getattr(handle.call.config, field, None)
        if value is not None:
            yield value
        handles += handle.call.parents.values()


@cache
def _pretrained_shape(model: str, field: str) -> ModelShape:
    # A search for suggestions plans the same model a hundred times, and some models take seconds to read.
    try:
        return from_pretrained(PretrainedBase(model=model), field)
    except ValueError as error:
        raise ConfigError(str(error)) from None
