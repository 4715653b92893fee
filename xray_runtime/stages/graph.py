"""The graph of a lifecycle: stages, and which takes whose checkpoint. Nothing here runs anything.

A call of a stage kind adds a stage and returns a `Handle`, which another call takes. A `Graph` by itself only records,
for plans; the workspace (`xray.tasks.workspace`) is a graph that runs its stages.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel

from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.config.validation import ConfigError
from xray_runtime.stages.artifacts import Artifact, RewardModel
from xray_runtime.stages.kind import Role, StageKind


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
        return Weighted(self, float(weight))

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"<{self.output.__name__} {self.name}>"


@dataclass(frozen=True)
class RewardFunction:
    """A function `f(prompts, replies) -> scores` as a source of reward."""

    function: Callable[..., Any] | str

    @property
    def name(self) -> str:
        """`module:function`, or the name of a function that is handed over as it is."""
        if isinstance(self.function, str):
            return self.function
        return f"{self.function.__module__}:{self.function.__qualname__}"

    def __mul__(self, weight: float) -> Weighted:
        return Weighted(self, float(weight))

    __rmul__ = __mul__


@dataclass(frozen=True)
class Weighted:
    """A source of reward with its weight."""

    source: Handle | RewardFunction
    weight: float

    def __mul__(self, weight: float) -> Weighted:
        return Weighted(self.source, self.weight * weight)

    __rmul__ = __mul__


def reward(function: Callable[..., Any] | str) -> RewardFunction:
    """A callable `(prompts, replies) -> scores`, one score a reply, as a source of reward."""
    return RewardFunction(function)


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

    def config_json(self) -> dict[str, Any]:
        dumped: dict[str, Any] = self.config.model_dump(mode="json")
        return dumped


class Graph:
    """Stages in the order they were called.

    Args:
        shorten: give every stage a step or two, for the determinism check.
        defaults: fields that a stage takes where its call leaves them out and its kind has them: generator, frozen, …
    """

    def __init__(
        self,
        seed: int = 0,
        runtime: RuntimeConfig | None = None,
        defaults: Mapping[str, Any] | None = None,
        *,
        shorten: bool = False,
    ) -> None:
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
        stage = name or self._free_name(kind.name)
        parents, terms, functions = _bind(stage, kind, inputs, keywords)
        known = kind.field_names(keywords)
        values = {k: v for k, v in self.defaults.items() if k in known and k not in keywords} | keywords
        if terms:
            values["rewards"] = [*values.get("rewards", ()), *terms]
        values = {k: v.model_dump() if isinstance(v, BaseModel) else v for k, v in values.items()}
        config = kind.validated(values, where=stage)
        if self.shorten:
            config = kind.shorten(config)
        try:
            kind.check(config, parents)
        except ValueError as error:
            raise ConfigError(f"{stage}: {error}") from None
        call = StageCall(stage, kind, config, self.seed, parents, functions)
        before = self.calls.get(stage)
        if before is not None:
            if (before.kind, before.config, before.parents) != (kind, config, parents):
                raise ConfigError(f"{stage}: two stages of this name; give one of them another: name=…")
            return self._handles[stage]
        self.calls[stage] = call
        handle = self._handles[stage] = Handle(self, stage, kind.output, call)
        self.submit(call)
        return handle

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
        raise RuntimeError(f"{handle.name}: this graph only plans; its stages have no results")


_CURRENT: contextvars.ContextVar[Graph] = contextvars.ContextVar("xray-graph")


def current_graph() -> Graph:
    """The graph of the innermost `with`. Raises ConfigError outside of one."""
    graph = _CURRENT.get(None)
    if graph is None:
        raise ConfigError('a stage can be called inside of `with xray.workspace("DIRECTORY"):` alone')
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


def _bind(
    stage: str, kind: StageKind, inputs: Sequence[Any], keywords: dict[str, Any]
) -> tuple[dict[str, Handle], list[dict[str, Any]], dict[str, Callable[..., Any]]]:
    """(role → handle, terms of the reward, functions handed over); takes the inputs out of `keywords`."""
    roles = list(kind.roles.values())
    if len(inputs) > len(roles):
        names = ", ".join(role.name for role in roles) or "none"
        raise ConfigError(f"{stage}: {len(inputs)} inputs are not allowed: {kind.name} takes {names}")
    given = dict(zip((role.name for role in roles), inputs, strict=False))
    for role in roles:
        if role.name in keywords and (role.many or not isinstance(keywords[role.name], list | dict)):
            if role.name in given:
                raise ConfigError(f"{stage}.{role.name}: given twice")
            given[role.name] = keywords.pop(role.name)
    parents: dict[str, Handle] = {}
    terms: list[dict[str, Any]] = []
    functions: dict[str, Callable[..., Any]] = {}
    for role in roles:
        value = given.get(role.name)
        if role.many:
            _bind_many(stage, role, value or [], parents, terms, functions)
        elif value is not None:
            parents[role.name] = _checked(f"{stage}.{role.name}", role, value)
        elif not role.optional:
            raise ConfigError(f"{stage}.{role.name}: is required: a {role.type.__name__}")
    return parents, terms, functions


def _bind_many(
    stage: str,
    role: Role,
    values: Any,
    parents: dict[str, Handle],
    terms: list[dict[str, Any]],
    functions: dict[str, Callable[..., Any]],
) -> None:
    if isinstance(values, Handle | Weighted | RewardFunction):
        values = [values]
    for number, value in enumerate(values):
        where = f"{stage}.{role.name}.{number}"
        if isinstance(value, dict) or (isinstance(value, BaseModel) and role.type is RewardModel):
            terms.append(value if isinstance(value, dict) else value.model_dump())
            continue
        weight = value.weight if isinstance(value, Weighted) else 1.0
        source = value.source if isinstance(value, Weighted) else value
        if callable(source) and not isinstance(source, Handle | StageKind):
            source = RewardFunction(source)
        if isinstance(source, RewardFunction) and issubclass(role.type, RewardModel):
            if not isinstance(source.function, str):
                functions[source.name] = source.function
            terms.append({"function": source.name, "weight": weight})
            continue
        name = f"{role.name}.{sum(k.startswith(f'{role.name}.') for k in parents)}"
        parents[name] = _checked(where, role, source)
        if issubclass(role.type, RewardModel):
            terms.append({"model": name, "weight": weight})


def _checked(where: str, role: Role, value: Any) -> Handle:
    if not isinstance(value, Handle):
        raise ConfigError(f"{where}: {value!r} is not allowed: must be a {role.type.__name__} that a stage makes")
    # A checkpoint that a plan did not open has no type yet.
    if not issubclass(value.output, role.type) and (value.call is not None or value.output is not Artifact):
        raise ConfigError(f"{where}: {value!r} is not allowed: must be a {role.type.__name__}")
    return value
