"""A WholeModel's optimizer steps: one is begun while the Workhorses still make the one before."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import ray

from xray_runtime.cluster.plain_errors import plain_errors
from xray_runtime.cluster.protocols import Ref, Scattered, WorkhorseHandle
from xray_runtime.data.batch import StepTotals, TextBatch

AHEAD = "ahead"
"""Ray's concurrency group that begins steps."""


@plain_errors
class SteppedModel:
    """Methods of a `WholeModel`."""

    _numbers: Iterator[int]
    _begun: dict[int, list[Ref[dict[str, float]]]]
    """Steps whose answers nobody has waited for, by number."""
    _shards: Callable[[Scattered[TextBatch], Callable[[WorkhorseHandle, TextBatch], Ref[Any]]], list[Ref[Any]]]
    _get: Callable[[list[Ref[dict[str, float]]]], list[dict[str, float]]]
    _reporting: Callable[[], list[int]]

    def _no_steps(self) -> None:
        self._numbers, self._begun = itertools.count(), {}

    @ray.method(concurrency_group=AHEAD)
    def begin_train(self, rows: Scattered[TextBatch], totals: StepTotals, lr: float) -> int:
        """Give the Workhorses an optimizer step over all rows; returns its number, for `end_train`. Also works while
        `end_train` waits for an earlier step."""
        number = next(self._numbers)
        self._begun[number] = self._shards(rows, lambda w, shard: w.train.remote(shard, totals, lr))
        return number

    def end_train(self, number: int) -> dict[str, float]:
        """Wait for a step; answers with sums over its rows and `grad_norm`.

        If a loss or the gradient is not finite, no rank steps and `grad_norm` is not finite; then `refused_by` is the
        first rank with such a loss.
        """
        answers, ranks = self._get(self._begun.pop(number)), self._reporting()
        stats = [answers[rank] for rank in ranks]
        sums = {name: sum(s.get(name, 0.0) for s in stats) for name in {name for s in stats for name in s}}
        # Every rank has the same norm.
        sums["grad_norm"] = stats[0]["grad_norm"]
        for rank, statistics in zip(ranks, stats, strict=True):
            if not all(math.isfinite(value) for name, value in statistics.items() if name != "grad_norm"):
                return sums | {"refused_by": float(rank)}
        return sums
