"""Separates and checks the inputs and fields of one call of a stage kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from xray_runtime.kernel.arguments import FIELDS, Arguments
from xray_runtime.kernel.config.validation import ConfigError, hint
from xray_runtime.kernel.graph.artifacts import Artifact, RewardModel
from xray_runtime.kernel.graph.handles import Handle, OpenGraph, RewardSource, Weighted, reward
from xray_runtime.kernel.graph.kind import Role, StageKind
from xray_runtime.methods.prepare.config import DataConfig


class Binding:
    """The inputs of one call."""

    def __init__(self, graph: OpenGraph, stage: str, kind: StageKind) -> None:
        self._graph, self._stage, self._kind = graph, stage, kind
        self.parents: dict[str, Handle] = {}
        self.terms: dict[str, list[dict[str, Any]]] = {}
        """Field → reward sources with their weights."""
        self.functions: dict[str, Callable[..., Any]] = {}
        """Functions that were passed as objects, by name."""

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
            if weighs and isinstance(source, RewardSource):
                term = {**source.fields, "weight": weight * source.fields.get("weight", 1.0)}
                given = source.source
                models = given if isinstance(given, list) else [given] if isinstance(given, Handle) else []
                if given is not None and not models:
                    term["function"] = self.add_function(where, source)
            names = [self._role(role, f"{self._stage}.{where}", model) for model in models]
            if names:
                term |= {"model": names[0]} if len(names) == 1 else {"models": names}
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


def check_functions(config: Any, inputs: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> None:
    """Raise ValueError if a reward function, or the gold score, takes what it cannot be given."""
    gold = getattr(config, "gold", None)
    if gold is not None and gold in functions:
        Arguments(functions[gold], f"gold {gold!r}", FIELDS).check(())
    data = dataset_config(inputs)
    for where in ("rewards", "judges"):
        for number, term in enumerate(getattr(config, where, ())):
            for name in (name for name in term.functions if name in functions):
                arguments = Arguments(functions[name], f"{where}.{number}.{term.field} {name!r}")
                arguments.check(None if data is None else data.columns)


def dataset_config(inputs: Mapping[str, Any]) -> DataConfig | None:
    """The config of the dataset that supplies prompts; None if it is an existing checkpoint."""
    handle = inputs.get("prompts", inputs.get("data"))
    config = handle.call.config if handle is not None and handle.call is not None else None
    return config if isinstance(config, DataConfig) else None


def article(type: type[Artifact]) -> str:
    return f"{'an' if type.__name__[0] in 'AEIOU' else 'a'} {type.__name__}"
