"""What a Workhorse asks of a training engine, however its model is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together."""

    rows: list[int]
    """Which of the rank's rows these are; none: a filler that only joins the collectives."""
    tensors: dict[str, Tensor]


class Scorer(Protocol):
    """One rank of a model. Every rank makes every call, with its replica's micro-batches; as many on each."""

    module: Any
    """What is left of the `HeadedLM` on this rank."""

    def forward(self, task: Callable[..., Any], *args: Any) -> Any:
        """`task(module, *args)`, where the module's parameters are whole."""

    def evaluate(self, task: Callable[..., Any], batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        """(micro-batch, `task(module, tensors)`) of each; nothing but on ranks where the model's output comes out."""


class Engine(Scorer, Protocol):
    """One rank of a trained model."""

    writes: bool
    """Whether this rank writes the tensors it yields and saves to disk, for all ranks that hold them."""

    def step(self, loss: Callable[[MicroBatch], Tensor], batches: Iterable[MicroBatch], lr: float) -> float:
        """One optimizer step at learning rate `lr` over the sum of the micro-batches' losses and of the ranks'.

        `loss` calls `forward`. Returns the global gradient norm before clipping. Where that is not finite, on all ranks
        alike, neither weights nor optimizer states have moved.
        """

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole float32 tensor) of this rank's trained parameters, one at a time.

        In mixed precision these are the masters: checkpoints lose nothing, and a generator rounds them to what it runs
        in. LoRA adapters come merged into the matrices they stand beside. The scalar head's are `scalar.weight` and
        `scalar.bias`.
        """

    def save(self, directory: Path) -> None:
        """Write weights and optimizer states in a form that any layout loads; see `states`."""

    def load(self, directory: Path) -> None:
        """Go on from what `save` wrote: under the same layout to the same bits."""
