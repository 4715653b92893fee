"""Optimizer steps, and their answers: sums over the whole step, all micro-batches and ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from xray_runtime.algorithms.schedules import learning_rate
from xray_runtime.cluster.protocols import ModelHandle, Ref, get_all
from xray_runtime.data.batch import StepTotals, TextBatch
from xray_runtime.kernel.errors import NonFiniteError

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage

log = logging.getLogger(__name__)


class TrainingRows(Protocol):
    """Rows to train on, by number."""

    def take(self, rows: np.ndarray) -> TextBatch: ...


@dataclass(frozen=True)
class StepStatistics:
    """A model's report on one optimizer step."""

    sums: Mapping[str, float]
    """Sums over all rows that the components of its loss log; `data.columns.STATISTICS` lists them."""
    grad_norm: float
    refused_by: int | None = None
    """First rank whose loss is not finite; None if all are."""
    computed_tokens: float = 0.0
    """Tokens that went through the model's layers: a shared prompt counts once, padding too."""

    def non_finite(self) -> Iterator[tuple[str, float]]:
        """The sums that are NaN or infinite, by name."""
        return ((name, value) for name, value in sorted(self.sums.items()) if not math.isfinite(value))


def read_step(answer: Mapping[str, float]) -> StepStatistics:
    """The result of `WholeModel.train`."""
    sums = dict(answer)
    norm, refused = sums.pop("grad_norm"), sums.pop("refused_by", None)
    computed = sums.pop("computed_tokens", 0.0)
    return StepStatistics(sums, norm, None if refused is None else int(refused), computed)


def router_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """How the routers of a mixture of experts used their experts, on average over the micro-batches of steps with these
    sums; empty for other models."""
    if not (num_tokens := sum(sums.get("router_tokens", 0.0) for sums in steps)):
        return {}
    names = ("max_load", "entropy", "idle")
    return {f"router/{name}": sum(s.get(f"router_{name}", 0.0) for s in steps) / num_tokens for name in names}


@dataclass
class SkippedSteps:
    """Optimizer steps of a stage that were skipped.

    An engine skips a step with a non-finite loss or gradient on all ranks, before it changes any weight
    (`Engine.step`); here it is decided whether the stage continues.
    """

    count: int = 0

    def check_step(self, stage: Stage[Any, Any], role: str, step: int, statistics: StepStatistics) -> bool:
        """Whether the optimizer of `role` took this step; False: its engine skipped it.

        Raises:
            NonFiniteError: more than `max_skipped_steps` were skipped.
        """
        wrong = next(statistics.non_finite(), None)
        if wrong is None and math.isfinite(statistics.grad_norm):
            return True
        self.count += 1
        if wrong is not None:
            rank = f" on rank {statistics.refused_by}" if statistics.refused_by is not None else ""
            cause = f"{wrong[0]} is {wrong[1]}{rank}"
        else:
            cause = f"its gradient's norm is {statistics.grad_norm}, while its loss is finite on every rank"
        allowed = stage.config.max_skipped_steps
        text = f"{stage.name}, optimizer step {step}: {role!r} skipped it, because {cause}"
        if self.count > allowed:
            raise NonFiniteError(f"{text} (skipped steps: {self.count}; max_skipped_steps = {allowed})")
        log.warning("%s (skipped steps: %d; max_skipped_steps = %d)", text, self.count, allowed)
        return False

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        """The finite metrics of a step, with the number of skipped steps."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        return finite | {"training/skipped_steps": float(self.count)}


@dataclass(frozen=True)
class Learning:
    """A model that a stage trains."""

    role: str
    model: ModelHandle
    peak: float | None = None
    """Peak learning rate; None: the config's."""


@dataclass(frozen=True)
class TrainingStep:
    """One optimizer step of each of a stage's models on the same rows."""

    lr: float
    """The first model's."""
    totals: StepTotals
    results: dict[str, StepStatistics]
    """By the role of the model."""
    taken: bool
    """False: a model skipped it."""


@dataclass(frozen=True)
class BegunStep:
    """A `TrainingStep` that is not waited for."""

    number: int
    lr: float
    totals: StepTotals
    calls: list[Ref[dict[str, float]]]


class Stepper:
    """Takes a stage's optimizer steps, of which there are `steps`; `skipped` counts those that a model skips."""

    def __init__(self, stage: Stage[Any, Any], models: Sequence[Learning], steps: int, skipped: SkippedSteps) -> None:
        self._stage, self._models, self._steps, self._skipped = stage, models, steps, skipped

    def begin(self, number: int, rows: TextBatch, totals: StepTotals) -> BegunStep:
        """Begin step `number`, from 0, of all models at the same time. Steps that were begun follow one another at
        once; no model is asked for anything else before they have ended."""
        rates = [learning_rate(self._stage.config, number, self._steps, peak=each.peak) for each in self._models]
        calls = [each.model.train.remote(rows, totals, rate) for each, rate in zip(self._models, rates, strict=True)]
        return BegunStep(number, rates[0], totals, calls)

    def end(self, begun: BegunStep) -> TrainingStep:
        """Wait for the oldest step that was begun.

        Raises:
            NonFiniteError: a model skipped more steps than `max_skipped_steps`.
        """
        pairs = zip(self._models, get_all(begun.calls), strict=True)
        results = {each.role: read_step(answer) for each, answer in pairs}
        # Each model steps or skips on its own, so all are counted.
        taken = [
            self._skipped.check_step(self._stage, role, begun.number, statistics)
            for role, statistics in results.items()
        ]
        return TrainingStep(begun.lr, begun.totals, results, all(taken))
