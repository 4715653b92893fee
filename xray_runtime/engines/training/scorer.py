"""A model that only scores, whole or as a tensor-parallel slice of every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from xray_runtime.engines.engine import MicroBatch


class PlainScorer:
    """One rank of a frozen model, with all layers."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def forward(self, task: Callable[..., Any], *args: Any) -> Any:
        return self.module(task, *args)

    def evaluate(self, task: Callable[..., Any], batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        for batch in batches:
            yield batch, self.forward(task, batch.tensors)
