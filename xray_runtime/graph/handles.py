"""What a call of a stage kind returns and takes: checkpoints, sources of reward, and their weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xray_runtime.config.validation import ConfigError

if TYPE_CHECKING:
    from xray_runtime.graph.artifacts import Artifact
    from xray_runtime.graph.graph import Graph, StageCall

FUNCTION_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Weighable:
    """What may be a source of reward: `0.5 * it` is one that counts half."""

    def __mul__(self, weight: float) -> Weighted:
        return Weighted(self, float(weight)) if isinstance(weight, int | float) else NotImplemented

    def __rmul__(self, weight: float) -> Weighted:
        return self * weight


class Handle(Weighable):
    """A checkpoint that exists, or the stage that will make it."""

    def __init__(self, graph: Graph, name: str, output: type[Artifact], call: StageCall | None) -> None:
        self.graph, self.name, self.output, self.call = graph, name, output, call

    def result(self) -> Any:
        """Wait for the checkpoint: its `path`, `sha256`, `metrics`, `lineage()`.

        Raises:
            RuntimeError: the stage failed (its own error), or this graph only plans.
        """
        return self.graph.result_of(self)

    def __repr__(self) -> str:
        return f"<{self.output.__name__} {self.name}>"


@dataclass(frozen=True)
class RewardSource(Weighable):
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


@dataclass(frozen=True)
class Weighted(Weighable):
    """A source of reward with its weight."""

    source: Weighable
    weight: float

    def __mul__(self, weight: float) -> Weighted:
        return Weighted(self.source, self.weight * weight)


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
