"""The interface of a training engine, however its model is sharded, and the scorer of a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from xray_runtime.data.batch import TextBatch
from xray_runtime.engines.states import hugging_face_name
from xray_runtime.engines.threads import in_threads
from xray_runtime.models.weight_files import HEAD_PREFIX

if TYPE_CHECKING:
    from xray_runtime.models.adapters import Whole
    from xray_runtime.models.heads import HeadedLM


@dataclass(frozen=True)
class MicroBatch:
    """Rows that pass through the model together."""

    number: int
    """Its place among those of a step."""
    rows: list[int]
    """Indices of the rank's rows; none: a filler that only joins the collectives."""
    tensors: TextBatch[Tensor]


class Scorer:
    """One rank of a model. Every rank makes every call, with equally many micro-batches of its replica.

    Args:
        module: this rank's part of the `HeadedLM`.
        threaded: micro-batches run on threads of their own, several at a time: on a CPU, without collectives.
    """

    def __init__(self, module: Any, threaded: bool = False) -> None:
        self.module, self.threaded = module, threaded

    def forward(self, task: Callable[..., Any], *args: Any) -> Any:
        """`task(module, *args)`, where the module's parameters are whole."""
        return self.module(task, *args)

    def evaluate(self, task: Callable[..., Any], batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        """(micro-batch, `task(module, tensors)`) of each, on ranks with the model's output; nothing on others."""
        if self.threaded:
            yield from in_threads(lambda batch: self.forward(task, batch.tensors), batches)
            return
        for batch in batches:
            yield batch, self.forward(task, batch.tensors)

    def close(self) -> None:
        """Remove what a library would hold of the model after its last use here."""


def whole_weights(
    module: HeadedLM, trained: Iterable[tuple[str, Tensor]], whole: Whole, *, merged: bool
) -> Iterator[tuple[str, Tensor]]:
    """`Engine.weights` of the `trained` parameters of `module`, by their names in it."""
    adapters = module.adapters
    for name, parameter in trained:
        plain = hugging_face_name(name)
        if adapters is None or plain.startswith(HEAD_PREFIX):
            yield plain, whole(name, parameter)
    if adapters is not None:
        yield from adapters.merged(whole) if merged else adapters.unmerged(whole)


class Engine(Protocol):
    """One rank of a trained model, which is a `Scorer` too."""

    turn: tuple[int, int]
    """(number, count): its place among the ranks to which `weights` gives the same tensors."""

    def step(self, loss: Callable[[MicroBatch], Tensor], batches: Iterable[MicroBatch], lr: float) -> float:
        """One optimizer step at learning rate `lr` over the sum of the losses of all micro-batches and ranks.

        `loss` calls `forward`, and several threads call it at a time if the engine is `threaded`. Returns the global
        gradient norm before clipping. If it is not finite (on all ranks), no weight and no optimizer state has changed.
        """

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole float32 tensor) of this rank's trained parameters, one at a time.

        In mixed precision these are the float32 masters. Adapters are merged into their matrices or, unless `merged`,
        come as they are under peft's names. The scalar head's names are `scalar.weight` and `scalar.bias`.
        """

    def save(self, directory: Path) -> None:
        """Write weights and optimizer states in a form that any layout can load; see `states`."""

    def load(self, directory: Path) -> None:
        """Continue from a snapshot of `save`; under the same layout with the same bits."""
