"""The graph of a lifecycle: stages, and which takes whose checkpoint. Nothing here runs anything.

A call of a stage kind adds a stage and returns a `Handle`, which another call takes. A `Graph` by itself only records,
for plans; the workspace (`xray.tasks.workspace`) is a graph that runs its stages.
"""

from __future__ import annotations

import contextvars
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel

from xray_runtime.config.allowed_imports import check_import
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.config.validation import ConfigError
from xray_runtime.stages.artifacts import Artifact, RewardModel
from xray_runtime.stages.checks import check_functions
from xray_runtime.stages.kind import KINDS, Role, StageKind, find_kind

STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""It is part of file names."""
FUNCTION_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
MAX_SEED = 2**31


class OnlyPlannedError(RuntimeError):
    """The result was asked for of a stage that is only written down."""

    def __init__(self, stage: str) -> None:
        super().__init__(f"{stage}: this graph only plans; its stages have no results")
        self.stage = stage


class Handle:
    """A checkpoint that exists, or the stage that will make it."""

    def __init__(self, graph: Graph, name: str, output: type[Artifact], call: StageCall | None) -> None:
        self.graph, self.name, self.output, self.call = graph, name, output, call

    def result(self) -> Any:
        """Wait for the checkpoint: its `path`, `sha256`, `metrics`, `lineage()`.

        Raises:
            RuntimeError: the stage failed (its own error), or this graph only plans.
        """
        return self.graph.result_of(self)

    def __mul__(self, weight: float) -> Weighted:
        return Weighted(self, float(weight)) if isinstance(weight, int | float) else NotImplemented

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"<{self.output.__name__} {self.name}>"


@dataclass(frozen=True)
class RewardSource:
    """A source of reward with fields of its own."""

    source: Callable[..., Any] | str | Handle | list[Handle] | None
    """A function or its import path; a reward model, or several as an ensemble; None: the fields say what it is."""
    fields: Mapping[str, Any]

    @property
    def name(self) -> str:
        """`module:function`, or the name of a function that is handed over as it is; of others none."""
        if isinstance(self.source, str):
            return self.source
        return f"{self.source.__module__}:{self.source.__qualname__}" if callable(self.source) else "a source of reward"

    def __mul__(self, weight: float) -> Weighted:
        return Weighted(self, float(weight)) if isinstance(weight, int | float) else NotImplemented

    __rmul__ = __mul__


@dataclass(frozen=True)
class Weighted:
    """A source of reward with its weight."""

    source: Handle | RewardSource
    weight: float

    def __mul__(self, weight: float) -> Weighted:
        return Weighted(self.source, self.weight * weight)

    __rmul__ = __mul__


def reward(source: Callable[..., Any] | str | Handle | Sequence[Handle] | None = None, **fields: Any) -> RewardSource:
    """A source of reward.

    Args:
        source: a function `(prompts, replies) -> scores`, one score a reply, or its import path; a reward model; an
            ensemble of them. None where `fields` say what it is: `verifier`, `service`, `judge`.
        fields: of `RewardTerm`: `when`, `uncertainty`, …

    Raises:
        ConfigError: it is none of these.
    """
    if source is None and fields:
        return RewardSource(None, fields)
    if isinstance(source, Handle):
        return RewardSource(source, fields)
    if isinstance(source, list | tuple) and source and all(isinstance(one, Handle) for one in source):
        return RewardSource(list(source), fields)
    path = isinstance(source, str) and FUNCTION_PATH.fullmatch(source)
    if not path and not (callable(source) and hasattr(source, "__qualname__")):
        raise ConfigError(
            f"reward: {source!r} is not allowed: must be a function, 'module:function', or reward models; or nothing, "
            "with fields that say what it is"
        )
    return RewardSource(source, fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class StageCall:
    """One stage of a graph before it runs."""

    name: str
    kind: StageKind
    config: Any
    seed: int
    parents: dict[str, Handle]
    """Role → what plays it; `rewards.0`, `rewards.1`, … of a role that takes many."""
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Those that were handed over as objects, by name: rewards, the gold score, an algorithm of the user's."""

    def config_json(self) -> dict[str, Any]:
        dumped: dict[str, Any] = self.config.model_dump(mode="json")
        return dumped


class Graph:
    """Stages in the order they were called.

    Args:
        seed: every random choice derives from it.
        defaults: fields that a stage takes where its call leaves them out and its kind has them: generator, frozen, …
        shorten: give every stage a step or two, for the determinism check.

    Raises:
        ConfigError: the seed is not allowed, or no kind has a field of a default's name.
    """

    def __init__(
        self,
        seed: int = 0,
        runtime: RuntimeConfig | None = None,
        defaults: Mapping[str, Any] | None = None,
        *,
        shorten: bool = False,
    ) -> None:
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < MAX_SEED:
            raise ConfigError(f"seed: {seed!r} is not allowed: must be a whole number from 0 to {MAX_SEED - 1}")
        _check_defaults(defaults or {})
        self.seed, self.runtime = seed, runtime or RuntimeConfig()
        self.defaults, self.shorten = dict(defaults or {}), shorten
        self.calls: dict[str, StageCall] = {}
        self._handles: dict[str, Handle] = {}

    def __enter__(self) -> Self:
        self._token = _CURRENT.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        _CURRENT.reset(self._token)
        return None

    def add(self, kind: StageKind, inputs: Sequence[Any], keywords: Mapping[str, Any], name: str | None) -> Handle:
        """See `StageKind.__call__`."""
        keywords = dict(keywords)
        stage = self._free_name(kind.name) if name is None else name
        if not isinstance(stage, str) or not STAGE_NAME.fullmatch(stage):
            raise ConfigError(f"name: {stage!r} is not allowed: must match {STAGE_NAME.pattern}")
        bound = _Bound(self, stage, kind)
        bound.bind(inputs, keywords)
        known = kind.field_names(keywords, where=stage)
        values = {k: v for k, v in self.defaults.items() if k in known and k not in keywords} | keywords | bound.terms
        values = {k: v.model_dump() if isinstance(v, BaseModel) else v for k, v in values.items()}
        for key, value in values.items():
            if callable(value):
                values[key] = bound.hand_over(key, reward(value))
        environment = values.get("environment")
        if isinstance(environment, Mapping) and callable(environment.get("path")):
            values["environment"] = {**environment, "path": bound.hand_over("environment", reward(environment["path"]))}
        config = kind.validated(values, where=stage)
        if self.shorten:
            config = kind.shorten(config)
        try:
            kind.check(config, bound.parents)
            check_functions(config, bound.parents, bound.functions)
            for function in kind.functions(config):
                if function not in bound.functions:
                    check_import(function)
        except ValueError as error:
            raise ConfigError(f"{stage}: {error}") from None
        call = StageCall(stage, kind, config, self.seed, bound.parents, bound.functions)
        before = self.calls.get(stage)
        if before is not None:
            if before != call:
                raise ConfigError(f"{stage}: two stages have this name; rename one with name=…")
            return self._handles[stage]
        self.calls[stage] = call
        handle = self._handles[stage] = Handle(self, stage, kind.output, call)
        try:
            self.submit(call)
        except BaseException:
            # It does not run: what is called next under its name is another attempt.
            del self.calls[stage], self._handles[stage]
            raise
        return handle

    def require(self, where: str, type: type[Artifact], value: Any) -> Handle:
        """`value` as an input of this type. Raises ConfigError, which begins with `where`."""
        wanted = f"must be {_a(type)}"
        if not isinstance(value, Handle):
            shown = value.name if isinstance(value, RewardSource | StageKind) else repr(value)
            raise ConfigError(f"{where}: {shown} is not allowed: {wanted} that a stage makes")
        if value.graph is not self:
            raise ConfigError(
                f"{where}: {value!r} belongs to another workspace: use its checkpoint, "
                f"xray.checkpoint('DIR#{value.name}')"
            )
        # A checkpoint that a plan did not open has no type yet.
        if not issubclass(value.output, type) and (value.call is not None or value.output is not Artifact):
            raise ConfigError(f"{where}: {value!r} is not allowed: {wanted}")
        return value

    def _free_name(self, kind: str) -> str:
        name, number = kind, 1
        while name in self.calls:
            number += 1
            name = f"{kind}-{number}"
        return name

    def checkpoint(self, ref: str) -> Handle:
        """A checkpoint that exists already: a plan takes its type on trust."""
        return Handle(self, ref, Artifact, None)

    def register(self, policy: Handle, evaluation: Handle | None = None, name: str | None = None) -> None:
        """Register a policy. A graph that only plans does nothing."""

    def submit(self, call: StageCall) -> None:
        """Called once for each stage, in order. A graph that only plans does nothing."""

    def result_of(self, handle: Handle) -> Any:
        raise OnlyPlannedError(handle.name)


_CURRENT: contextvars.ContextVar[Graph] = contextvars.ContextVar("xray-graph")


def current_graph() -> Graph:
    """The graph of the innermost `with`. Raises ConfigError outside of one."""
    graph = _CURRENT.get(None)
    if graph is None:
        raise ConfigError('a stage can be called only inside `with xray.workspace("DIRECTORY"):`')
    return graph


_PLANNING: contextvars.ContextVar[list[tuple[Path, Graph]] | None] = contextvars.ContextVar("planning", default=None)


def is_planning() -> list[tuple[Path, Graph]] | None:
    """Where graphs are only written down at the moment: the list they go into, with their output directories."""
    return _PLANNING.get()


@contextmanager
def planning() -> Iterator[list[tuple[Path, Graph]]]:
    """Workspaces that are opened in the block only record their graphs."""
    graphs: list[tuple[Path, Graph]] = []
    token = _PLANNING.set(graphs)
    try:
        yield graphs
    finally:
        _PLANNING.reset(token)


@contextmanager
def recording(seed: int = 0, runtime: RuntimeConfig | None = None, defaults: Any = None) -> Iterator[Graph]:
    """A graph that only records the stages called in the block."""
    with Graph(seed, runtime, defaults) as graph:
        yield graph


def _check_defaults(defaults: Mapping[str, Any]) -> None:
    find_kind("")
    known = sorted({name for kind in KINDS.values() for name in kind.all_field_names})
    for name in defaults:
        if name not in known:
            raise ConfigError(f"{name}: unknown field{_hint(name, known)}: no stage kind has a field of this name")


def _a(type: type[Artifact]) -> str:
    return f"{'an' if type.__name__[0] in 'AEIOU' else 'a'} {type.__name__}"


def _hint(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


class _Bound:
    """The inputs of one call, taken apart."""

    def __init__(self, graph: Graph, stage: str, kind: StageKind) -> None:
        self._graph, self._stage, self._kind = graph, stage, kind
        self.parents: dict[str, Handle] = {}
        self.terms: dict[str, list[dict[str, Any]]] = {}
        """Field → sources of reward with their weights."""
        self.functions: dict[str, Callable[..., Any]] = {}
        """Those that were handed over as objects."""

    def bind(self, inputs: Sequence[Any], keywords: dict[str, Any]) -> None:
        """Take positional inputs, and those among `keywords`, which are removed there."""
        stage, roles = self._stage, list(self._kind.roles.values())
        if len(inputs) > len(roles):
            names = ", ".join(role.name for role in roles) or "none"
            raise ConfigError(f"{stage}: {len(inputs)} inputs are not allowed: {self._kind.name} takes {names}")
        given = dict(zip((role.name for role in roles), inputs, strict=False))
        for role in roles:
            if role.name in keywords:
                if role.name in given:
                    raise ConfigError(f"{stage}.{role.name}: given twice")
                given[role.name] = keywords.pop(role.name)
        for name, value in keywords.items():
            if isinstance(value, Handle | Weighted | RewardSource):
                known = [role.name for role in roles]
                allowed = f"{self._kind.name} takes {', '.join(known) or 'none'}"
                raise ConfigError(f"{stage}.{name}: unknown input{_hint(name, known)}; {allowed}")
        for role in roles:
            value = given.get(role.name)
            if role.many:
                if value is not None:
                    self._bind_many(role, value)
            elif value is not None:
                self.parents[role.name] = self._graph.require(f"{stage}.{role.name}", role.type, value)
            elif not role.optional:
                raise ConfigError(f"{stage}.{role.name}: is required: {_a(role.type)}")

    def _bind_many(self, role: Role, values: Any) -> None:
        # A field of the same name says how much each source counts; functions are sources too.
        weighs = issubclass(role.type, RewardModel) and role.name in self._kind.all_field_names
        if not isinstance(values, list | tuple):
            values = [values]
        terms: list[dict[str, Any]] = []
        for position, value in enumerate(values):
            where = f"{role.name}.{position}"
            if weighs and isinstance(value, dict | BaseModel):
                terms.append(value if isinstance(value, dict) else value.model_dump())
                continue
            source, weight = (value.source, value.weight) if isinstance(value, Weighted) and weighs else (value, 1.0)
            if callable(source) and not isinstance(source, StageKind):
                source = reward(source)
            models: list[Any] = [source]
            term: dict[str, Any] = {"weight": weight}
            if weighs and isinstance(source, RewardSource):
                term = {**source.fields, "weight": weight * source.fields.get("weight", 1.0)}
                given = source.source
                models = given if isinstance(given, list) else [given] if isinstance(given, Handle) else []
                if given is not None and not models:
                    term["function"] = self.hand_over(where, source)
            names = [self._role(role, f"{self._stage}.{where}", model) for model in models]
            if names:
                term |= {"model": names[0]} if len(names) == 1 else {"models": names}
            terms.append(term)
        if weighs:
            self.terms[role.name] = terms

    def _role(self, role: Role, where: str, value: Any) -> str:
        """The name of one of the inputs that a role takes many of; a model of two sources is one input."""
        mine = {name: handle for name, handle in self.parents.items() if name.startswith(f"{role.name}.")}
        handle = self._graph.require(where, role.type, value)
        name = next((name for name, known in mine.items() if known is handle), f"{role.name}.{len(mine)}")
        self.parents[name] = handle
        return name

    def hand_over(self, where: str, source: RewardSource) -> str:
        """The name of a function; one that is an object goes with the call."""
        if callable(source.source):
            known = self.functions.setdefault(source.name, source.source)
            if known is not source.source:
                raise ConfigError(
                    f"{self._stage}.{where}: two functions are called {source.name!r}; rename one of them"
                )
        return source.name
