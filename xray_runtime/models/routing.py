"""Routes of a mixture of experts, read from a Hugging Face model's routers or forced upon them.

A model that replays routes weights the given experts by its own router, so that the router learns (R3, Ma et al. 2025);
their order, in which their outputs are summed, is the given one. Routes go through a pass as an argument of each layer,
so that a layer that is computed again in the backward pass has the same ones, in whichever thread.

Shapes: S tokens of a pass, L layers with experts, K experts of a token, E experts of a layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from xray_runtime.data.routes import Routes, id_type
from xray_runtime.models.family import Family

ARGUMENT = "routes"
"""Name of the argument of a backbone, and of its layers, that holds ids [1, S, L, K]; −1: the layer's own choice."""
_now = threading.local()


def routers_of(lm: nn.Module, family: Family) -> list[Any]:
    """The routers of a model's layers with experts, in order; none where the family does not say how they are read."""
    if family.routing is None:
        return []
    layers = lm.get_submodule(family.parts.layers)
    return [part for name, part in layers.named_modules() if name.rpartition(".")[2] in family.routers]


def take_routes(lm: nn.Module, family: Family) -> int:
    """Have the layers of `lm` take routes; returns the number of those with experts. Called before anything wraps a
    layer's pass, and at most once."""
    if family.routing is None:
        return 0
    count = 0
    layers: Any = lm.get_submodule(family.parts.layers)
    for layer in layers:
        routers = [part for name, part in layer.named_modules() if name.rpartition(".")[2] in family.routers]
        assert len(routers) <= 1
        layer.forward = _WithRoutes(layer.forward, count if routers else None)
        for router in routers:
            router.register_forward_hook(_forced(family))
        count += len(routers)
    return count


class _WithRoutes:
    """A layer's pass, in which its router takes the experts of layer `index` in the routes."""

    def __init__(self, compute: Callable[..., Any], index: int | None) -> None:
        self._compute, self._index = compute, index

    def __call__(self, *args: Any, routes: Tensor | None = None, **options: Any) -> Any:
        if routes is None or self._index is None:
            return self._compute(*args, **options)
        _now.ids = routes[..., self._index, :].flatten(0, -2)
        try:
            return self._compute(*args, **options)
        finally:
            _now.ids = None


def _forced(family: Family) -> Callable[[Any, Any, Any], Any]:
    def hook(router: Any, args: Any, output: Any) -> Any:
        ids = getattr(_now, "ids", None)
        assert family.routing is not None
        return None if ids is None else family.routing.force(router, output, ids)

    return hook


class RecordedRoutes:
    """The routes of all tokens of a batch, while a model generates."""

    def __init__(self, routers: list[Any]) -> None:
        self._steps: list[list[tuple[Tensor, Tensor]]] = [[] for _ in routers]
        self._dtype = id_type(max(int(router.num_experts) for router in routers))

    def note(self, layer: int, ids: Tensor, weights: Tensor) -> None:
        """Note the choice of a layer's router in a step [S, K]."""
        self._steps[layer].append((ids, weights.float()))

    def rows(self, num_rows: int) -> BatchRoutes:
        """Those of the steps so far, each of so many rows; they are then forgotten."""
        found = []
        for part in range(2):
            layers = [torch.cat([step[part].unflatten(0, (num_rows, -1)) for step in of], 1) for of in self._steps]
            found.append(torch.stack(layers, 2).cpu().numpy())
        self._steps = [[] for _ in self._steps]
        return BatchRoutes(found[0].astype(self._dtype), found[1])


class BatchRoutes(NamedTuple):
    """`Routes` of all tokens of padded rows."""

    ids: np.ndarray
    """[B, S / B, L, K]."""
    weights: np.ndarray

    def of(self, row: int, start: int, end: int) -> Routes:
        """The routes of a row's tokens from `start` to `end`."""
        return Routes(self.ids[row, start:end], self.weights[row, start:end])


@contextmanager
def recorded_routes(lm: nn.Module, family: Family) -> Iterator[RecordedRoutes]:
    """Record what the routers of `lm` choose meanwhile. Raises ValueError: it has none that can be read."""
    routers = routers_of(lm, family)
    if not routers or family.routing is None:
        raise ValueError(f"the routes of a {type(lm).__name__} cannot be read")
    recorded, read = RecordedRoutes(routers), family.routing.read

    def noting(layer: int) -> Callable[[Any, Any, Any], None]:
        def hook(router: Any, args: Any, output: Any) -> None:
            recorded.note(layer, *read(output))

        return hook

    hooks = [router.register_forward_hook(noting(layer)) for layer, router in enumerate(routers)]
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()
