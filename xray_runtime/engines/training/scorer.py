"""A model that only scores, whole or as a tensor-parallel slice of every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from xray_runtime.engines.engine import MicroBatch
from xray_runtime.engines.training.threads import in_threads


class PlainScorer:
    """One rank of a frozen model, with all layers.

    Args:
        threaded: the model is on a CPU, and its passes are no collectives.
    """

    def __init__(self, module: Any, threaded: bool = False) -> None:
        self.module, self.threaded = module, threaded

    def forward(self, task: Callable[..., Any], *args: Any) -> Any:
        return self.module(task, *args)

    def evaluate(self, task: Callable[..., Any], batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        if self.threaded:
            yield from in_threads(lambda batch: self.forward(task, batch.tensors), batches)
            return
        for batch in batches:
            yield batch, self.forward(task, batch.tensors)
