"""Inputs and results of stage calls: checkpoints, reward sources, and weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel

from xray_runtime.kernel.config.section import Section
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.artifacts import Artifact

FUNCTION_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Weighable:
    """A possible reward source; multiply it by a number to set its weight, as in `0.5 * judge`."""

    def __mul__(self, weight: float) -> Weighted:
        return Weighted(self, float(weight)) if isinstance(weight, int | float) else NotImplemented

    def __rmul__(self, weight: float) -> Weighted:
        return self * weight


class OpenGraph(Protocol):
    """A graph (`graph.Graph`) as stage kinds and handles see it."""

    def add(self, kind: Any, inputs: Sequence[Any], keywords: Mapping[str, Any], name: str | None) -> Handle: ...

    def require(self, where: str, type: type[Artifact], value: Any) -> Handle: ...

    def checkpoint(self, ref: str) -> Handle: ...

    def register(self, policy: Handle, evaluation: Handle | None = None, name: str | None = None) -> None: ...

    def directory_of(self, handle: Handle) -> Path: ...

    def result_of(self, handle: Handle) -> Any: ...


class PlannedModel(Protocol):
    """One model of a stage (`engines.roles.ModelRole`) as the graph sees it."""

    def check_left_open(self, stage: str) -> None:
        """Raises ConfigError if the config of `stage` sets a layout that `runtime.parallel: auto` would choose."""


class Kind(Protocol):
    """A stage kind (`kind.StageKind`) as the planner sees it."""

    @property
    def models(self) -> Callable[[Any], Mapping[str, PlannedModel]]: ...

    @property
    def base_model(self) -> Callable[[Any], BaseModel | str | None]: ...


class Call(Protocol):
    """The stage that makes a checkpoint (`graph.StageCall`), as its inputs and the planner see it."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> Kind: ...

    @property
    def config(self) -> Section: ...

    @property
    def parents(self) -> Mapping[str, Handle]: ...

    def config_json(self) -> dict[str, Any]: ...


class Handle(Weighable):
    """A checkpoint that exists or that a stage will make."""

    def __init__(self, graph: OpenGraph, name: str, output: type[Artifact], call: Call | None) -> None:
        self.graph, self.name, self.output, self.call = graph, name, output, call

    def result(self) -> Any:
        """Wait for the checkpoint: its `path`, `sha256`, `metrics`, `lineage()`.

        Raises:
            RuntimeError: the stage failed (its own error), or this graph is only planned.
        """
        return self.graph.result_of(self)

    def __repr__(self) -> str:
        return f"<{self.output.__name__} {self.name}>"


@dataclass(frozen=True)
class RewardSource(Weighable):
    """A reward source with its fields."""

    source: Callable[..., Any] | str | Handle | list[Handle] | None
    """A function or its import path; a reward model, or several as an ensemble; None: the fields define it."""
    fields: Mapping[str, Any]

    @property
    def name(self) -> str:
        """`module:function`; "a reward source" if it is not a function."""
        if isinstance(self.source, str):
            return self.source
        return f"{self.source.__module__}:{self.source.__qualname__}" if callable(self.source) else "a reward source"


@dataclass(frozen=True)
class Weighted(Weighable):
    """A reward source with its weight."""

    source: Weighable
    weight: float

    def __mul__(self, weight: float) -> Weighted:
        return Weighted(self.source, self.weight * weight)


def reward(source: Callable[..., Any] | str | Handle | Sequence[Handle] | None = None, **fields: Any) -> RewardSource:
    """A reward source.

    Args:
        source: a function `(prompts, replies) -> scores`, one score per reply, or its import path; a reward model; a
            list of them as an ensemble. None if `fields` define the source: `verifier`, `service`, `judge`.
        fields: fields of the source's kind: `when`, `uncertainty`, …

    Raises:
        ConfigError: `source` is none of these.
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
            f"reward: {source!r} is not allowed: must be a function, 'module:function', or reward models; or leave it "
            "out and set another kind's field, such as verifier"
        )
    return RewardSource(source, fields)  # type: ignore[arg-type]
