"""A model put once into Ray's object store, and mapped by any number of processes on that machine without a copy.

`share` takes a module apart into its skeleton (the module with parameters on the meta device) and its arrays;
`open_shared` puts the skeleton on views of the mapped arrays. Worth it where several processes read the same weights:
scoring replicas, sweeps over one frozen model, many short-lived readers. A model that is trained is written to, so
there it saves the reading from disk and no memory.
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
    """Where a model lies in the object store. Small: hand it to as many actors as you like, and hold it as long as any
    of them reads."""

    skeleton: Any
    """Reference to the module without its parameters' values (buffers are in it)."""
    arrays: WeightUpdate


def share(module: nn.Module) -> SharedModel:
    """Put `module` (on the CPU) into the object store; one bucket of extra memory."""
    import ray

    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in module.parameters()
    }
    skeleton = copy.deepcopy(module, memo)
    return SharedModel(ray.put(skeleton), pack(module.named_parameters(), version=0))


def open_shared(shared: SharedModel, trained: Callable[[str], bool] = lambda name: False) -> nn.Module:
    """The module on the mapped weights.

    Parameters whose name `trained` accepts are copies that require gradients; all others are read-only: writing to one
    ends the process, since the memory is mapped for reading.
    """
    import ray

    module: nn.Module = ray.get(shared.skeleton)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    values: dict[str, nn.Parameter] = {}
    for bucket in shared.arrays.buckets:
        # Unchecked: objects in the store cannot be changed, and checksums would read all that a reader may never touch.
        for name, tensor in unpack(bucket, check=False):
            mine = trained(name)
            values[name] = nn.Parameter(tensor.clone() if mine else tensor, requires_grad=mine)
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                # By identity, so that tied parameters stay tied.
                owner._parameters[key] = values[names[id(parameter)]]
    return module
