"""Micro-batches on threads of their own, on a CPU.

Threads inside operations wait for one another hundreds of times in a pass, which costs small models about what it saves
them. Two micro-batches at a time wait once (`benchmarks/step.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor, nn

from xray_runtime.data.batch import TextBatch

AT_ONCE = 2
SMALLEST = 2**25
"""Tokens times parameters below which Python's own work, which one thread does at a time, outweighs the rest."""

T = TypeVar("T")
R = TypeVar("R")


def micro_batches_at_once(module: nn.Module, rows: TextBatch) -> int:
    """The number of micro-batches of `rows` to compute at the same time."""
    work = rows.num_tokens() * sum(parameter.numel() for parameter in module.parameters())
    return _at_once() if work >= SMALLEST else 1


def in_threads(task: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[T, R]]:
    """(item, `task(item)`) in order; pairs of items at the same time, on halves of the calling thread's threads. Raises
    the exception of the first task that failed, when no other is running."""
    at_once, with_gradients = _at_once(), torch.is_grad_enabled()
    threads = torch.get_num_threads() // at_once

    def run(item: T) -> R:
        # Both settings are a thread's own.
        torch.set_num_threads(threads)
        with torch.set_grad_enabled(with_gradients):
            return task(item)

    remaining = iter(items)
    while some := list(islice(remaining, at_once)):
        if len(some) == 1:
            yield some[0], task(some[0])
            continue
        futures = [_pool().submit(run, item) for item in some]
        wait(futures)
        yield from zip(some, (future.result() for future in futures), strict=True)


def add_gradients(loss: Callable[[T], Tensor], parameters: Sequence[nn.Parameter], batches: Iterable[T]) -> None:
    """Add the gradients of the micro-batches' losses to those of `parameters`, in the order of the micro-batches."""

    def gradients(batch: T) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(loss(batch), parameters, allow_unused=True)

    for _, found in in_threads(gradients, batches):
        for parameter, gradient in zip(parameters, found, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad += gradient


def _at_once() -> int:
    return min(AT_ONCE, torch.get_num_threads())


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(AT_ONCE, "micro-batch")
