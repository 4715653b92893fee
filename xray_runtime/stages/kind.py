"""A stage kind: everything X-ray knows of one kind of stage, in one object.

Name, config schema, typed inputs, output, body, what its models need, what its page shows. Nothing else in the project
lists kinds. One that is registered (`stage_kind`) can be called: it adds a stage to the graph at hand.

    @stage_kind("distill", inputs=DistillInputs, config=DistillConfig, output=Model)
    def distill(stage: Stage[DistillConfig, DistillInputs], out: Path, recorder: Recorder) -> int: ...
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, get_args, get_origin

from pydantic import BaseModel, TypeAdapter

from xray_runtime.config.engines import GeneratorConfig, LayoutConfig, Section
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.config.validation import ConfigError, validate_as
from xray_runtime.stages.artifacts import TYPES, Artifact

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from xray_runtime.stages.graph import Handle
    from xray_runtime.store.snapshots import Snapshot
    from xray_runtime.workers.generator_spec import GeneratorSpec
    from xray_runtime.workers.model_spec import ModelSpec
    from xray_runtime.workers.protocols import ModelHandle

C = TypeVar("C")
I = TypeVar("I")  # noqa: E741

Layouts = dict[str, LayoutConfig | GeneratorConfig]
"""Role of a model → how it is spread."""
Panels = Sequence[tuple[str, Sequence[str]]]
"""(title, metrics) of each training curve."""


class Recorder(Protocol):
    """Where a stage reports what people look at; nothing reported here enters a checkpoint."""

    log_dir: Path
    """Noisy output of workers and engines goes to files in this directory."""

    def progress(self, done: int, total: int, unit: str, note: str = "") -> None: ...

    def metrics(self, values: Mapping[str, float], step: int) -> None: ...

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None: ...

    def figure(self, name: str, figure: Figure) -> None: ...

    def resume(self) -> Snapshot | None:
        """The newest snapshot of this stage, if an attempt before left one; metrics after it are forgotten."""

    def snapshot_due(self, step: int) -> bool:
        """Whether to write a snapshot after `step` steps: now and then, and whenever the stage is asked to stop."""

    def write_snapshot(self, step: int, state: dict[str, Any], save: Callable[[Path], None]) -> None:
        """Make a snapshot of `state` and of what `save` writes into a directory. Raises where asked to stop."""


class OpenModels(Protocol):
    """Starts one WholeModel a role, all at the same time, and ends them all, whatever happens."""

    def __call__(
        self, specs: Mapping[str, ModelSpec | GeneratorSpec]
    ) -> AbstractContextManager[dict[str, ModelHandle]]: ...


@dataclass(frozen=True)
class Stage(Generic[C, I]):
    """All a stage body may depend on."""

    name: str
    seed: int
    config: C
    inputs: I
    runtime: RuntimeConfig
    open_models: OpenModels
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Functions that were handed over as objects, by name."""


Body = Callable[[Stage[Any, Any], Path, Recorder], int]
"""(stage, directory to write the checkpoint into, recorder) → steps done."""


@dataclass(frozen=True)
class NoInputs:
    """Of a stage that starts from nothing."""


@dataclass(frozen=True, eq=False)
class StageKind:
    """One kind of stage."""

    name: str
    config: Any
    """A `Section`, or an annotated union of sections with a discriminator."""
    inputs: type[Any]
    """A dataclass of artifacts: `Model`, `Model | None` (may be absent), or `list[RewardModel]`."""
    output: type[Artifact]
    body: str | Body
    """A function, or `module:function` where its module imports what a graph's author needs not."""
    models: Callable[[Any], Layouts] = lambda config: {}
    """What its models ask for, all alive at the same time."""
    computes: bool = True
    """Whether device and threads can change its result."""
    outside: Callable[[Any], Mapping[str, str]] = lambda config: {}
    """Fields that name files, directories or hub names → their values: the key digests the bytes behind them."""
    functions: Callable[[Any], Sequence[str]] = lambda config: ()
    """Import paths of the functions it calls: the key digests their source."""
    check: Callable[[Any, Mapping[str, Any]], None] = lambda config, inputs: None
    """Raises ValueError where config and inputs (role → handle) do not go together."""
    shorten: Callable[[Any], Any] = lambda config: config
    """The same config with a step or two, for the determinism check."""
    panels: Panels = ()
    """Training curves on its page and in the report."""
    results: str | None = None
    """The file with the numbers it is run for; of an evaluation they are its metrics `NAME/…` too."""
    sides: tuple[str, str] | None = None
    """Of an evaluation: roles of the policy judged and of the one it is held against."""
    title: str = ""
    """What it makes, for people: on the model card."""

    @property
    def module(self) -> str:
        """The module whose code computes it."""
        return self.body.partition(":")[0] if isinstance(self.body, str) else self.body.__module__

    @property
    def registered_in(self) -> str:
        """The module that registers it when it is imported."""
        return self.inputs.__module__ if isinstance(self.body, str) else self.body.__module__

    @property
    def run(self) -> Body:
        """The body."""
        if not isinstance(self.body, str):
            return self.body
        module, _, name = self.body.partition(":")
        body: Body = getattr(importlib.import_module(module), name)
        return body

    @property
    def roles(self) -> dict[str, Role]:
        """Inputs by name, in order."""
        hints = typing.get_type_hints(self.inputs)
        return {f.name: Role.of(f.name, hints[f.name]) for f in dataclasses.fields(self.inputs)}

    def validated(self, values: Mapping[str, Any], where: str = "") -> Any:
        """Keyword fields as this kind's config. Raises ConfigError: one line with field, value and what is allowed."""
        return validate_as(member_of(self.config, values), dict(values), where=where)

    def field_names(self, values: Mapping[str, Any]) -> set[str]:
        """The fields of the config that `values` choose, where there is a choice."""
        return set(member_of(self.config, values).model_fields)

    def __call__(self, *inputs: Any, name: str | None = None, **keywords: Any) -> Handle:
        """Add a stage of this kind to the graph at hand.

        Args:
            inputs: checkpoints, or what will be one, in the order of `roles`; by keyword too.
            name: of the stage; by default the kind's, with a number where it is taken.
            keywords: inputs and fields of the config.

        Raises:
            ConfigError: a field is unknown or its value not allowed, or an input is missing or of another type.
        """
        from xray_runtime.stages.graph import current_graph

        return current_graph().add(self, inputs, keywords, name)


@dataclass(frozen=True)
class Role:
    """One input of a kind."""

    name: str
    type: type[Artifact]
    optional: bool
    many: bool

    @classmethod
    def of(cls, name: str, hint: Any) -> Role:
        """From a dataclass field's annotation."""
        if get_origin(hint) is list:
            return cls(name, get_args(hint)[0], optional=True, many=True)
        members = [m for m in get_args(hint) if m is not type(None)] if get_origin(hint) is not None else [hint]
        if isinstance(hint, types.UnionType):
            return cls(name, members[0], optional=type(None) in get_args(hint), many=False)
        return cls(name, members[0], optional=False, many=False)


def member_of(config: Any, values: Mapping[str, Any]) -> type[BaseModel]:
    """The section that `values` choose of a discriminated union; the first where they name none."""
    if isinstance(config, type):
        return config
    union, info = get_args(config)[:2]
    members: list[type[BaseModel]] = list(get_args(union))
    tag = values.get(info.discriminator)
    return next((m for m in members if tag in get_args(m.model_fields[info.discriminator].annotation)), members[0])


KINDS: dict[str, StageKind] = {}
"""Every registered kind, ours and users'."""


def register(kind: StageKind) -> StageKind:
    """Make a kind known. Raises ConfigError where its name stands for another."""
    known = KINDS.setdefault(kind.name, kind)
    if known is not kind and (known.module, known.body) != (kind.module, kind.body) and not _same_source(known, kind):
        raise ConfigError(f"stage kind {kind.name!r} is registered twice: in {known.module} and in {kind.module}")
    KINDS[kind.name] = kind
    TYPES.setdefault(kind.output.__name__, kind.output)
    return kind


def _same_source(a: StageKind, b: StageKind) -> bool:
    # A module that is loaded again, as in a notebook, registers its kinds again.
    return a.module == b.module


def stage_kind(
    name: str,
    *,
    inputs: type[Any] = NoInputs,
    config: Any = Section,
    output: type[Artifact] = Artifact,
    **facts: Any,
) -> Callable[[Body], StageKind]:
    """Register the decorated body as the kind `name`; `facts` are the other fields of `StageKind`."""

    def decorate(body: Body) -> StageKind:
        return register(StageKind(name=name, config=config, inputs=inputs, output=output, body=body, **facts))

    return decorate


def find_kind(name: str, module: str | None = None) -> StageKind | None:
    """A registered kind; `module` is imported where it may be the one that registers it."""
    importlib.import_module("xray_runtime.stages.kinds")
    if name not in KINDS and module is not None:
        importlib.import_module(module)
    return KINDS.get(name)


def config_of(kind: StageKind, data: Mapping[str, Any]) -> Any:
    """A kind's config from its JSON."""
    return TypeAdapter(kind.config).validate_json(json.dumps(data))
