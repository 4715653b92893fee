"""A stage kind: all that X-ray knows about one kind of stage, in one object.

It has a name, config schema, typed inputs, output, body, model roles, and what its page shows. Nothing else in the
project lists kinds. Calling a registered kind (`stage_kind`) adds a stage to the current graph.

    @stage_kind("distill", inputs=DistillInputs, config=DistillConfig, output=Model)
    def distill(stage: Stage[DistillConfig, DistillInputs], out: Path, recorder: Recorder) -> int: ...
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, cast, get_args, get_origin

from pydantic import PydanticUserError, TypeAdapter
from typing_extensions import TypeVar

from xray_runtime.kernel.config.section import Section, sections
from xray_runtime.kernel.config.validation import ConfigError, validate_as
from xray_runtime.kernel.graph.artifacts import TYPES, Artifact, RewardModel
from xray_runtime.kernel.graph.current import current_graph
from xray_runtime.kernel.graph.handles import Handle, PlannedModel
from xray_runtime.kernel.graph.kind_help import KindAttribute, help_text, signature

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from xray_runtime.kernel.store.snapshots import Snapshot

USES: tuple[str, ...] = ()
"""None of the modules imported by name here: a key digests the code of a kind's body separately."""


C = TypeVar("C", bound=Section, default=Any)

Series = Mapping[str, Sequence[tuple[int, float]]]
"""Metric → its (step, value) points."""

Panels = Sequence[tuple[str, Sequence[str]]]
"""(title, metrics) of each training curve."""


class Note(str):
    """A finding that is no fault, such as the number of rows that were left out."""

    __slots__ = ()


@dataclass(frozen=True)
class Answer:
    """A person's answer to `Recorder.ask`."""

    go_on: bool
    by: str
    """Name that the person gave."""
    note: str
    """The person's reason."""


class Recorder(Protocol):
    """Receives a stage's progress, metrics, tables and figures; none of them enters a checkpoint."""

    log_dir: Path
    """Directory for the log files of workers and engines."""

    def progress(self, done: int, total: int, unit: str, note: str = "") -> None: ...

    def metrics(self, values: Mapping[str, float], step: int) -> None: ...

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None: ...

    def figure(self, name: str, figure: Figure) -> None: ...

    def ask(self, question: str) -> Answer | None:
        """Wait for a person's answer to `question` (Markdown); None if nobody can be asked or nobody answered."""

    def resume(self) -> Snapshot | None:
        """The newest snapshot of an earlier attempt, if there is one. Later metrics are discarded."""

    def refuse_snapshot(self, problem: str) -> None:
        """Resume from the snapshot before the newest, which must not be loaded."""

    def snapshot_due(self, step: int) -> bool:
        """Whether to write a snapshot after `step` steps: at intervals, and if the stage was asked to stop."""

    def write_snapshot(self, step: int, state: dict[str, Any], save: Callable[[Path], None]) -> None:
        """Write a snapshot of `state` and of the files that `save` writes. Raises if the stage was asked to stop."""


Body = Callable[..., int]
"""(`Stage`, directory to write the checkpoint into, `Recorder`) → steps done."""


@dataclass(frozen=True)
class NoInputs:
    """Inputs of a stage that has none."""


@dataclass(frozen=True, eq=False)
class StageKind(Generic[C]):
    """One kind of stage."""

    name: str
    config: type[C] | object
    """A `Section`, or an annotated union of sections with a discriminator."""
    inputs: type[Any]
    """A dataclass of artifacts: `Model`, `Model | None` (may be absent), or `list[RewardModel]`."""
    output: type[Artifact]
    body: str | Body
    """A function, or `module:function` if its module has imports that a graph does not need."""
    models: Callable[[C], Mapping[str, PlannedModel]] = lambda config: {}
    """Name → `engines.roles.ModelRole`; all are open at the same time. The planner knows nothing else of the stage."""
    base_model: Callable[[C], Section | str | None] = lambda config: None
    """The external model that the stage outputs, as sizes or a name. None: the output has the shape of the trained
    model, or of the first input that is a model."""
    computes: bool = True
    """Whether device and number of threads can change the result."""
    outside: Callable[[C], Mapping[str, str]] = lambda config: {}
    """Fields that name files, directories or hub repositories → their values. The key digests their content, not their
    names. `model` is looked up among models, every other field among datasets."""
    functions: Callable[[C], Sequence[str]] = lambda config: ()
    """Import paths of further functions it calls, beside its sections': the key digests their source."""
    check: Callable[[C, Mapping[str, Handle]], None] = lambda config, inputs: None
    """Raises ValueError if config and inputs (role → handle) do not fit together."""
    shorten: Callable[[C], C] = lambda config: config
    """The config with one or two steps, for the determinism check."""
    panels: Panels = ()
    """Training curves on the stage's page and in the report."""
    headline: Mapping[str, str] = field(default_factory=dict)
    """Metrics, or numbers in `results`, for the one-line summary → label."""
    findings: Callable[[Series], Sequence[str]] = lambda series: ()
    """Sentences for the summary that explain why the stage cannot have learned."""
    results: str | None = None
    """The file with its results; an evaluation also reports them as metrics `NAME/…`."""
    sides: tuple[str, ...] | None = None
    """For an evaluation: roles of the judged policy and, if any, of its opponent."""
    title: str = ""
    """Name of its output on the model card."""

    def functions_of(self, config: C) -> list[str]:
        """All functions that a stage calls: those of `functions`, and of the sections of its config."""
        return [*self.functions(config), *(name for _, part in sections(config) for name in part.called_functions)]

    def outside_of(self, config: C) -> dict[str, str]:
        """All that a stage reads from outside: by `outside`, and by the sections of its config."""
        fields = dict(self.outside(config))
        for path, part in sections(config):
            fields |= {f"{path}.{field}" if path else field: value for field, value in part.outside_fields.items()}
        return fields

    @property
    def sections(self) -> list[type[Section]]:
        """Its config section, or the sections of the union."""
        return [self.config] if isinstance(self.config, type) else list(get_args(get_args(self.config)[0]))

    @property
    def module(self) -> str:
        """Module of the body."""
        return self.body.partition(":")[0] if isinstance(self.body, str) else self.body.__module__

    @property
    def registered_in(self) -> str:
        """Module that registers the kind when it is imported."""
        return _REGISTERED_IN[self.name]

    @property
    def run(self) -> Body:
        """The body, imported."""
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

    def inputs_at(self, paths: Mapping[str, Path]) -> Any:
        """The inputs with their paths by role; a role that takes several has `ROLE.0`, `ROLE.1`, …"""
        artifacts: dict[str, Any] = {}
        for name, role in self.roles.items():
            if role.many:
                numbers = sorted(int(r.rsplit(".", 1)[1]) for r in paths if r.startswith(f"{name}."))
                artifacts[name] = [role.type(paths[f"{name}.{number}"]) for number in numbers]
            elif name in paths:
                artifacts[name] = role.type(paths[name])
        return self.inputs(**artifacts)

    def validated(self, values: Mapping[str, Any], where: str = "") -> C:
        """Validate keyword fields. Raises ConfigError: one line with field, value and what is allowed."""
        return cast("C", validate_as(self.section(values, where), dict(values), where=where))

    def section(self, values: Mapping[str, Any], where: str = "") -> type[Section]:
        """The config section that `values` select, by default the first. Raises ConfigError if none has that name."""
        if isinstance(self.config, type):
            return self.config
        field = get_args(self.config)[1].discriminator
        by_tag = {tag: one for one in self.sections for tag in get_args(one.model_fields[field].annotation)}
        tag = values.get(field, next(iter(by_tag)))
        if not isinstance(tag, str) or tag not in by_tag:
            path = f"{where}.{field}" if where else field
            shown = json.dumps(tag, ensure_ascii=False, default=repr)
            raise ConfigError(f"{path}: {shown} is not allowed: must be one of {', '.join(map(repr, by_tag))}")
        return by_tag[tag]

    @property
    def all_field_names(self) -> set[str]:
        """Field names of all sections."""
        return {name for section in self.sections for name in section.model_fields}

    def __call__(self, *inputs: Any, name: str | None = None, **keywords: Any) -> Handle:
        """Add a stage of this kind to the current graph.

        Args:
            inputs: handles, in the order of `roles`; also by keyword.
            name: name of the stage; by default the kind's, with a number if that is taken.
            keywords: inputs and fields of the config.

        Raises:
            ConfigError: a field is unknown, a value is not allowed, or an input is missing or has the wrong type.
        """
        return current_graph().add(self, inputs, keywords, name)


StageKind.__doc__ = KindAttribute(help_text, StageKind.__doc__)  # type: ignore[assignment]
StageKind.__signature__ = KindAttribute(signature, None)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Role:
    """One input of a kind."""

    name: str
    type: type[Artifact]
    optional: bool
    many: bool

    @classmethod
    def of(cls, name: str, hint: Any) -> Role:
        """From a dataclass field's annotation. Raises ConfigError if the annotation has none of the allowed forms."""
        optional = get_origin(hint) in (typing.Union, types.UnionType) and type(None) in get_args(hint)
        many = get_origin(hint) is list
        types_ = [t for t in get_args(hint) if t is not type(None)] if optional or many else [hint]
        if len(types_) != 1 or not isinstance(types_[0], type) or not issubclass(types_[0], Artifact):
            raise ConfigError(f"input {name!r}: {hint} is not allowed: must be an artifact, A, A | None or list[A]")
        return cls(name, types_[0], optional or many, many)


KINDS: dict[str, StageKind] = {}
"""Every registered kind, ours and users'."""
_REGISTERED_IN: dict[str, str] = {}
NAME = re.compile(r"[a-z][a-z0-9_]*")


def register(kind: StageKind[C], module: str | None = None) -> StageKind[C]:
    """Register a kind.

    Args:
        module: the module that registers it when imported; by default the caller's.

    Raises:
        ConfigError: the name is taken or not allowed, an input's type is not allowed, or another type has the name of
            its output.
    """
    if not NAME.fullmatch(kind.name):
        raise ConfigError(f"stage kind {kind.name!r} is not allowed: must match {NAME.pattern}")
    known = KINDS.get(kind.name)
    # A module that is reloaded, as in a notebook, registers its kinds again.
    if known is not None and (known.module, _name(known.body)) != (kind.module, _name(kind.body)):
        raise ConfigError(f"stage kind {kind.name!r} is registered twice: in {known.module} and in {kind.module}")
    try:
        roles = kind.roles.values()
    except ConfigError as error:
        raise ConfigError(f"stage kind {kind.name!r}: {error}") from None
    for role in roles:
        # Reward sources are both: the field holds their weights.
        if role.name in kind.all_field_names and not (role.many and issubclass(role.type, RewardModel)):
            raise ConfigError(f"stage kind {kind.name!r}: {role.name!r} is both an input and a field of its config")
    for artifact in (kind.output, *(role.type for role in roles)):
        other = TYPES.setdefault(artifact.__name__, artifact)
        if other.__module__ != artifact.__module__:
            raise ConfigError(
                f"stage kind {kind.name!r}: the type {artifact.__name__} of {artifact.__module__} is not allowed: "
                f"{other.__module__} has a type of this name"
            )
        TYPES[artifact.__name__] = artifact
    KINDS[kind.name] = kind
    _REGISTERED_IN[kind.name] = module or sys._getframe(1).f_globals["__name__"]
    return kind


def _name(body: str | Body) -> str:
    return body if isinstance(body, str) else body.__qualname__


def stage_kind(
    name: str,
    *,
    inputs: type[Any] = NoInputs,
    config: object = Section,
    output: type[Artifact] = Artifact,
    **facts: Any,
) -> Callable[[Body], StageKind]:
    """Register the decorated body as the kind `name`; `facts` are the other fields of `StageKind`.

    Raises:
        ConfigError: as `register`, or a field of the config has a type that no value can be checked against.
    """

    def decorate(body: Body) -> StageKind:
        kind = StageKind(name=name, config=config, inputs=inputs, output=output, body=body, **facts)
        for section in kind.sections:
            try:
                # Here, and not at the first call, which may come when other stages are computed.
                section.model_rebuild(raise_errors=False)
            except PydanticUserError as error:
                cause = str(error).partition("\n")[0]
                raise ConfigError(f"stage kind {name!r}: {section.__name__}: {cause}") from error
        return register(kind, body.__module__)

    return decorate


def config_of(kind: StageKind[C], data: Mapping[str, Any]) -> C:
    """A kind's config from JSON."""
    config: C = TypeAdapter(cast("type[C]", kind.config)).validate_json(json.dumps(data))
    return config
