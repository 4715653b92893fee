"""Adapters beside Megatron-core's parallel layers.

A layer of Megatron holds the matrices of several layers of Hugging Face's (`weights`). Each of these has an adapter of
its own, whose results stand where the matrix's do. A peer with rows of a matrix has those rows of B and of DoRA's
norms, and the whole A; one with columns has those columns of A, and the rest whole.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from xray_runtime.engines.trainers.megatron.weights import Fused, adapter_part
from xray_runtime.models.adapters import AdaptedLinear, Adapters, joined_norms


def adapt(module: nn.Module, adapters: Adapters, matrices: dict[str, Fused], peers: Any) -> dict[str, Fused]:
    """Put `adapters` into Megatron's layers, and freeze all but them and the scalar head; those of other pipeline
    stages are forgotten.

    Args:
        matrices: `module`'s parameters.
        peers: the group of tensor-parallel ranks.

    Returns:
        Megatron's name → parameter, of the adapters.
    """
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith("scalar."))
    found: dict[str, Fused] = {}
    held: dict[str, AdaptedLinear] = {}
    for name, matrix in matrices.items():
        place, plain = name.removesuffix(".weight"), [piece.removesuffix(".weight") for piece in matrix.pieces]
        layers = [adapters.layers.get(each) for each in plain]
        if not any(layers):
            continue
        base: Any = module.get_submodule(place)
        for full, layer in zip(plain, layers, strict=True):
            if layer is not None:
                held[full], last = layer, full.rpartition(".")[2]
                parts = _split(layer, matrix, full, base.weight, peers)
                base.add_module(last, layer)
                found |= {f"{place}.{last}.{part}": fused for part, fused in parts.items()}
        base.forward = _AdaptedForward(base, matrix, layers, peers)
    adapters.layers = held
    return found


def _split(layer: AdaptedLinear, matrix: Fused, name: str, weight: Tensor, peers: Any) -> dict[str, Fused]:
    """Leave this peer its part of the adapter of the layer `name`."""
    layer.base_layer = nn.Identity()  # Megatron has the matrix
    found = {}
    for part, parameter in layer.parts().items():
        found[part] = adapter_part(matrix, f"{name}.{part}", tuple(parameter.shape))
        parameter.data = found[part].own(parameter.data, peers.rank(), peers.size()).to(weight)
    for side in "AB":
        start = getattr(layer, f"start_{side}")
        if start is not None:
            own = found[f"lora_{side}.weight"].own(start, peers.rank(), peers.size())
            setattr(layer, f"start_{side}", own.to(weight.device))
    if matrix.dim == 0:
        # Peers have the same A x; what flows back to it is summed over them.
        layer.between = functools.partial(copy_to_tensor_model_parallel_region, group=peers)
    else:
        layer.between = functools.partial(reduce_from_tensor_model_parallel_region, group=peers)
        layer.over_columns = functools.partial(joined_norms, peers)
    return found


class _AdaptedForward:
    """The forward pass of a layer of Megatron with an adapter, or None, beside each of its `matrix`'s pieces."""

    def __init__(self, base: Any, matrix: Fused, layers: Sequence[AdaptedLinear | None], peers: Any) -> None:
        self._base, self._compute, self._matrix, self._layers, self._peers = base, base.forward, matrix, layers, peers
        # How the outputs, one a row of each piece, stand in the layer's own.
        rows, dim = tuple((shape[0],) for shape in matrix.shapes), -1 if matrix.dim == 0 else None
        self._outputs = replace(matrix, shapes=rows, dim=dim)

    def __call__(self, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """(outputs [S, B, out], bias) of inputs [S, B, in], as Megatron's."""
        out, bias = self._compute(x, *args, **options)
        layers = [layer if layer is not None and not layer.is_off else None for layer in self._layers]
        if not any(layers):
            return out, bias
        rank, size = self._peers.rank(), self._peers.size()
        widths = [high - low for low, high in self._outputs.spans(rank, size)]
        own = list(zip(layers, self._matrix.split(self._base.weight, rank, size), widths, strict=True))
        added = [layer.added(x) if layer else x.new_zeros(*x.shape[:-1], width) for layer, _, width in own]
        out = out + self._outputs.join(added, size)
        if all(layer is None or layer.magnitude is None for layer in layers):
            return out, bias
        shares = [layer.share(weight) if layer else weight.new_ones(width) for layer, weight, width in own]
        return out * self._outputs.join(shares, size), bias
