"""The training loop of every stage that learns from a dataset: SFT, reward model, DPO, KTO.

A method says its batches, the sums of its objective and its metrics. The loop does the rest: data cursor, optimizer
steps, learning rate, skipped steps, progress, evaluation, the best version, snapshots, and how the stage ends.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from xray_runtime.cluster.protocols import ModelHandle
from xray_runtime.data.batch import StepTotals, TextBatch
from xray_runtime.data.batching import Cursor
from xray_runtime.methods.common.training.policy_versions import BestVersion
from xray_runtime.methods.common.training.resumable import Resumable
from xray_runtime.methods.common.training.steps import BegunStep, Learning, SkippedSteps, Stepper, StepStatistics

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.kernel.graph.kind import Recorder


@dataclass(frozen=True)
class Trained:
    """A step that was made."""

    index: np.ndarray
    """Numbers of its rows."""
    rows: TextBatch
    totals: StepTotals
    result: StepStatistics
    seconds: float


class Method:
    """A method's part of the loop. Its metrics are `name/…`."""

    name: ClassVar[str]
    asks_model: ClassVar[bool] = False
    """Whether `batch` asks the model that is trained."""
    evaluations: ClassVar[int] = 8
    """How often held-out rows are evaluated, spread over the steps; the last step is always followed by it."""

    def batch(self, index: np.ndarray) -> tuple[TextBatch, StepTotals]:
        """The rows of a step, by the numbers that the cursor drew."""
        raise NotImplementedError

    def metrics(self, step: Trained) -> dict[str, float]:
        """Metrics of a step, besides its gradient norm and learning rate."""
        raise NotImplementedError

    def heldout(self) -> dict[str, float]:
        """Metrics of held-out rows."""
        raise NotImplementedError

    def summary(self, metrics: Mapping[str, float]) -> str:
        """One line about a step."""
        raise NotImplementedError

    def first_metrics(self) -> dict[str, float]:
        """Metrics before the first step."""
        return {}

    def validate(self) -> tuple[dict[str, float], float]:
        """(metrics of the rows that `validation` left out, score of this version: higher is better)."""
        raise AssertionError(f"{self.name} has no validation")


def training_loop(
    stage: Stage[Any, Any],
    recorder: Recorder,
    method: Method,
    models: Mapping[str, ModelHandle],
    cursor: Cursor,
    steps: int,
    best: BestVersion | None = None,
) -> None:
    """Train the one model in `models` for `steps` steps; `best` keeps the version that `validation` scores highest."""
    config, skipped = stage.config, SkippedSteps()
    validation = config.validation if best is not None else None
    [(role, model)] = models.items()
    stepper = Stepper(stage, [Learning(role, model)], steps, skipped)
    files, parts = ([], {}) if best is None else ([best.versions], {"validation": best.state})
    state = Resumable(recorder, models, files, cursor=cursor, skipped=skipped, **parts)
    done = state.restore()
    if not done and (first := method.first_metrics()):
        recorder.metrics(first, 0)

    def begin(number: int) -> tuple[np.ndarray, TextBatch, BegunStep, float]:
        start, index = time.perf_counter(), np.array(cursor.take(config.batch_size))
        rows, totals = method.batch(index)
        return index, rows, stepper.begin(number, rows, totals), start

    ahead, ended = None, 0.0
    for number in range(done, steps):
        index, rows, begun, start = ahead or begin(number)
        evaluates = number + 1 == steps or number % max(steps // method.evaluations, 1) == 0
        validates = validation is not None and validation.is_due(number + 1, steps)
        # The model goes on with the next step at once, unless something else asks for it first.
        alone = method.asks_model or evaluates or validates or recorder.snapshot_due(number + 1)
        ahead = None if alone else begin(number + 1)
        step = stepper.end(begun)
        start, ended = max(start, ended), time.perf_counter()
        result = step.results[role]
        metrics = method.metrics(Trained(index, rows, step.totals, result, ended - start))
        metrics |= {f"{method.name}/grad_norm": result.grad_norm, f"{method.name}/lr": step.lr}
        metrics["speed/computed_tokens"] = result.computed_tokens
        if evaluates:
            metrics |= method.heldout()
        if best is not None and validates:
            found, score = method.validate()
            metrics |= found
            best.update(models, number + 1, score)
        recorder.metrics(skipped.metrics(metrics), number)
        recorder.progress(number + 1, steps, "steps", method.summary(metrics))
        if ahead is None:
            state.step_done(number + 1, steps)
