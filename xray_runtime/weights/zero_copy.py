"""Zero-copy loading: a model in Ray's object store, mapped by many processes of a machine without a copy.

`share` stores a module's skeleton (with parameters on the meta device) and its arrays; `open_shared` puts the skeleton
on views of the mapped arrays. This helps when several processes read the same weights: scoring replicas, sweeps over a
frozen model, short-lived readers. For a trained model it only saves reading from disk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from xray_runtime.weights.object_store import WeightUpdate, pack, unpack


@dataclass(frozen=True)
class SharedModel:
    """References to a model in the object store, for any number of actors. Hold it as long as any of them reads."""

    skeleton: Any
    """Reference to the module without the values of its parameters, but with buffers."""
    arrays: WeightUpdate


def share(module: nn.Module) -> SharedModel:
    """Put `module` (on CPU) into the object store, with one bucket of extra memory."""
    import ray

    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in module.parameters()
    }
    skeleton = copy.deepcopy(module, memo)
    return SharedModel(ray.put(skeleton), pack(module.named_parameters(), version=0))


def open_shared(shared: SharedModel, trained: Callable[[str], bool] = lambda name: False) -> nn.Module:
    """The module on the mapped weights.

    Parameters whose name `trained` accepts are copies that require gradients. All others are read-only: a write would
    crash the process.
    """
    import ray

    module: nn.Module = ray.get(shared.skeleton)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    values: dict[str, nn.Parameter] = {}
    for bucket in shared.arrays.buckets:
        # Unchecked: stored objects cannot change, and checksums would read weights that may never be used.
        for name, tensor in unpack(bucket, check=False):
            mine = trained(name)
            values[name] = nn.Parameter(tensor.clone() if mine else tensor, requires_grad=mine)
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                # By identity, so that tied parameters stay tied.
                owner._parameters[key] = values[names[id(parameter)]]
    return module
