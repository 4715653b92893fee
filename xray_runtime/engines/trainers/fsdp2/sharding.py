"""A model under `fully_shard`: each rank holds the same share of the rows of every parameter.

The model is sharded as a skeleton, then each rank reads its own rows. What is gathered together: a layer; the output
layer and the embeddings, unless they are tied; all else with the root module.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers.modeling_layers import GradientCheckpointingLayer

from xray_runtime.engines.shard_loading import Weights, load_buffers
from xray_runtime.engines.trainers.fsdp2.expert_parallel import ExpertParallel
from xray_runtime.kernel.signs import part_done
from xray_runtime.kernel.store.shards import Piece
from xray_runtime.models.heads import HeadedLM


def shard(
    module: HeadedLM,
    weights: Weights,
    device: torch.device,
    dtype: torch.dtype,
    *,
    regather: bool,
    experts: ExpertParallel | None = None,
) -> None:
    """Shard `module` over all ranks of the process group and load its weights: trained ones in float32, others in
    `dtype`, in which all passes run. Gradients are summed over ranks and micro-batches in float32.

    Args:
        regather: free what a forward pass gathered, and gather it again for the backward pass.
        experts: those that ranks do not all gather.
    """
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    apart = [] if experts is None else [(each, experts.mesh) for each in experts.modules]
    for each, ranks in (*apart, *((each, mesh) for each in (*_units(module), module))):
        sharded = fully_shard(each, mesh=ranks, mp_policy=policy, reshard_after_forward=regather)
        # The losses are shares of a global sum. gloo cannot average, and has no sum that divides.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    _load(module, weights, device, experts)
    load_buffers(module, weights, device)
    # Also has `fully_shard` take over the parameters that were loaded.
    module.to(device)


def sharded_parameters(module: nn.Module) -> list[tuple[str, DTensor]]:
    """(name, parameter) of the trained ones, while none is gathered. They stay the same objects ever after."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return [(name, p) for name, p in named if isinstance(p, DTensor)]


def release_gathered(module: nn.Module) -> None:
    """Free what passes without gradients left gathered, so that the module's parameters are the shares again."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def rows_of(parameter: DTensor, experts: ExpertParallel | None = None) -> Piece:
    """The rows of a parameter that this rank holds, of its own `experts` or of all: as `torch.chunk`, so that the last
    ranks may have fewer or none."""
    shape, rank = tuple(parameter.shape), parameter.device_mesh.get_local_rank()
    chunk = -(-shape[0] // parameter.device_mesh.size())
    low, high = min(chunk * rank, shape[0]), min(chunk * (rank + 1), shape[0])
    return Piece.of(shape, 0, (low, high)) if experts is None else experts.piece(shape, low, high)


def own_rows(parameter: DTensor) -> Tensor:
    """This rank's rows of a parameter or of its gradient, without a copy."""
    with torch.no_grad():
        return parameter.to_local()


def _units(module: HeadedLM) -> list[nn.Module]:
    """Parts of the model that are gathered one after the other."""
    layers = [each for each in module.modules() if isinstance(each, GradientCheckpointingLayer)]
    embeddings, head = module.lm.get_input_embeddings(), module.lm.get_output_embeddings()
    tied = head.weight is embeddings.weight
    # A layer inside another first.
    return [*reversed(layers), *([] if tied else [embeddings, head])]


def _load(module: HeadedLM, weights: Weights, device: torch.device, experts: ExpertParallel | None) -> None:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            # Grouped by identity, so that tied parameters stay tied.
            places.setdefault(id(parameter), []).append((owner, key))
    for name, old in list(module.named_parameters()):
        assert isinstance(old, DTensor)
        if old.is_meta:
            piece = rows_of(old, experts if experts is not None and name in experts.names else None)
            width = old[0].numel()
            values = weights.share(name, piece.low * width, piece.size).view(piece.box_shape)
            share = DTensor.from_local(
                values.to(device, old.dtype),
                old.device_mesh,
                (Shard(0),),
                run_check=False,
                shape=old.shape,
                stride=old.stride(),
            )
            new = nn.Parameter(share, requires_grad=old.requires_grad)
            for owner, key in places[id(old)]:
                owner._parameters[key] = new
        part_done()
