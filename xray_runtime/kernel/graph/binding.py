"""Separates and checks the inputs and fields of one call of a stage kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from xray_runtime.kernel.config.validation import ConfigError, hint
from xray_runtime.kernel.graph.artifacts import Artifact, Dataset, RewardModel
from xray_runtime.kernel.graph.handles import Handle, OpenGraph, RewardSource, Weighted, reward
from xray_runtime.kernel.graph.kind import Role, StageKind
from xray_runtime.kernel.plugs import REGISTRIES

REWARDS = "xray.rewards"
"""The kinds of reward; `rewards.term.Term` is their base."""


class Binding:
    """The inputs of one call."""

    def __init__(self, graph: OpenGraph, stage: str, kind: StageKind) -> None:
        self._graph, self._stage, self._kind = graph, stage, kind
        self.parents: dict[str, Handle] = {}
        self.terms: dict[str, list[dict[str, Any]]] = {}
        """Field → reward sources with their weights."""
        self.functions: dict[str, Callable[..., Any]] = {}
        """Functions that were passed as objects, by name."""

    @property
    def columns(self) -> Sequence[str] | None:
        """Columns of the dataset among the inputs; None: they are not known before it is made."""
        roles = (role.name for role in self._kind.roles.values() if issubclass(role.type, Dataset))
        calls = (self.parents[name].call for name in roles if name in self.parents)
        return next((call.config.row_columns for call in calls if call is not None), None)

    def bind(self, inputs: Sequence[Any], keywords: dict[str, Any]) -> None:
        """Bind positional inputs, and those among `keywords`, which are removed from it."""
        stage, roles = self._stage, list(self._kind.roles.values())
        if len(inputs) > len(roles):
            names = ", ".join(role.name for role in roles) or "none"
            raise ConfigError(f"{stage}: {len(inputs)} inputs are not allowed: {self._kind.name} takes {names}")
        given = dict(zip((role.name for role in roles), inputs, strict=False))
        for role in roles:
            if role.name in keywords:
                if role.name in given:
                    raise ConfigError(f"{stage}.{role.name}: is set twice, by position and by name")
                given[role.name] = keywords.pop(role.name)
        for name, value in keywords.items():
            if isinstance(value, Handle | Weighted | RewardSource):
                known = [role.name for role in roles]
                allowed = f"{self._kind.name} takes {', '.join(known) or 'none'}"
                raise ConfigError(f"{stage}.{name}: unknown input{hint(name, known)}; {allowed}")
        for role in roles:
            value = given.get(role.name)
            if role.many:
                if value is not None:
                    self._bind_many(role, value)
            elif value is not None:
                self.parents[role.name] = self._graph.require(f"{stage}.{role.name}", role.type, value)
            elif not role.optional:
                raise ConfigError(f"{stage}.{role.name}: is required: {article(role.type)}")

    def _bind_many(self, role: Role, values: Any) -> None:
        # A config field of the same name holds the weight of each source; functions are sources too.
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
            function = None
            if weighs and isinstance(source, RewardSource):
                term = {**source.fields, "weight": weight * source.fields.get("weight", 1.0)}
                given = source.source
                models = given if isinstance(given, list) else [given] if isinstance(given, Handle) else []
                if given is not None and not models:
                    function = self.add_function(where, source)
            names = [self._role(role, f"{self._stage}.{where}", model) for model in models]
            if weighs and (function is not None or names):
                term |= _field(function, names)
            terms.append(term)
        if weighs:
            self.terms[role.name] = terms

    def _role(self, role: Role, where: str, value: Any) -> str:
        """The input's name in a role that takes several. A model that two sources use is one input."""
        bound = {name: handle for name, handle in self.parents.items() if name.startswith(f"{role.name}.")}
        handle = self._graph.require(where, role.type, value)
        name = next((name for name, known in bound.items() if known is handle), f"{role.name}.{len(bound)}")
        self.parents[name] = handle
        return name

    def add_function(self, where: str, source: RewardSource) -> str:
        """The function's name; a function object is added to the call."""
        if callable(source.source):
            known = self.functions.setdefault(source.name, source.source)
            if known is not source.source:
                raise ConfigError(
                    f"{self._stage}.{where}: two functions are called {source.name!r}; rename one of them"
                )
        return source.name


def _field(function: str | None, models: Sequence[str]) -> Mapping[str, Any]:
    """The field of the kind of reward that takes a function, or reward models in these roles."""
    kinds = REGISTRIES[REWARDS]
    given = (kinds.get(name).given(function, models) for name in kinds)
    return next(field for field in given if field is not None)


def article(type: type[Artifact]) -> str:
    return f"{'an' if type.__name__[0] in 'AEIOU' else 'a'} {type.__name__}"
