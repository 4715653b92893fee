"""The last layer's MLP at the tokens alone whose states are read.

A loss reads the states before the tokens of replies, a reward model's only the last one of each sequence. The other
tokens matter to the last layer as keys and values of its attention; what comes behind that, two thirds of the layer's
arithmetic, is for nobody. States that are not read are then not the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.nn.functional import embedding

Reads = Literal["all", "replies", "ends"]
"""Which states are read: of all tokens, of those from the prompt's last on, or of each sequence's last."""
WORTH = 7 / 8
"""Share of a row's tokens above which gathering them would cost what it saves."""

_places: ContextVar[Tensor | None] = ContextVar("places", default=None)
"""A thread's own: several compute micro-batches of one module at a time."""


@contextmanager
def reading(places: Tensor | None) -> Iterator[None]:
    """Passes in the context read the states at `places` [K] of the row alone; None: all."""
    token = _places.set(places)
    try:
        yield
    finally:
        _places.reset(token)


def compute_what_is_read(layer: Any) -> None:
    """Have the MLP of a model's last layer look at what is read. Without `reading` it computes what it did before."""
    mlp = getattr(layer, "mlp", None)
    if mlp is not None and not isinstance(mlp.forward, _OfRead):
        mlp.forward = _OfRead(mlp.forward)


@dataclass(frozen=True)
class _OfRead:
    mlp: Callable[[Tensor], Tensor]

    def __call__(self, states: Tensor) -> Tensor:
        """[1, M, H] of a row's states; 0 at those that are not read."""
        places = _places.get()
        if places is None:
            return self.mlp(states)
        found = self.mlp(embedding(places, states[0])[None])[0]
        return found.new_zeros(states.shape[1], found.shape[-1]).index_copy(0, places, found)[None]
