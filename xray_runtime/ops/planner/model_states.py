"""Weights, gradients and optimizer states of a model under training, and what of them stays between its turns.

After ZeRO (Rajbhandari et al. 2020, §3 and §5), with DeepSpeed's own copies.
"""

from __future__ import annotations

from collections.abc import Collection

from xray_runtime.engines.capabilities import Sharding
from xray_runtime.engines.layouts import TRAINERS
from xray_runtime.kernel.plugs import able, unsupported
from xray_runtime.models.lora import EXPERTS
from xray_runtime.models.shapes import ModelShape, ceil_div

FLOAT32_BYTES, HALF_BYTES = 4, 2


def sharding_of(library: str) -> Sharding:
    """The cost in memory of a trainer's sharding. Raises ValueError: the planner cannot know."""
    capabilities = TRAINERS.get(library).capabilities
    if capabilities.sharding is None:
        where = "runtime.parallel = 'auto'"
        raise ValueError(unsupported(f"library = {library!r}", where, able(TRAINERS, "sharding")))
    return capabilities.sharding


def optimizer_bytes(weight_bytes: int, zero_stage: int, sharding: Sharding) -> int:
    """AdamW's bytes per trained parameter: two float32 moments, and a float32 master copy of half-precision weights
    (K = 12 in the ZeRO paper). DeepSpeed's ZeRO 1 to 3 also copy float32 weights.
    """
    return 12 if weight_bytes < FLOAT32_BYTES or (zero_stage and sharding.copies_float32) else 8


def gradient_bytes(weight_bytes: int, zero_stage: int, float32_sums: bool) -> int:
    """Gradient bytes per trained parameter: the weights' width; with float32 sums 4, plus the last pass's gradients
    unless ZeRO 2 or 3 reduces them immediately.
    """
    if weight_bytes == FLOAT32_BYTES or not float32_sums:
        return weight_bytes
    return FLOAT32_BYTES if zero_stage >= 2 else FLOAT32_BYTES + weight_bytes


def kept_bytes(
    gradients: int, bucket: int, trained: int, zero_stage: int, sharding: Sharding, *, float32_sums: bool
) -> int:
    """Bytes of gradients and buffers that are kept between turns.

    DeepSpeed 0.19's ZeRO-3 keeps its gradients and its bucket, allocated once (`stage3.py`); ZeRO-1 the float32 sums of
    half-precision gradients (`bf16_optimizer.py`). Other gradients are dropped after a step.
    """
    if not sharding.keeps_gradients:
        return 0
    if zero_stage >= 3:
        return gradients + bucket
    return FLOAT32_BYTES * trained if zero_stage == 1 and float32_sums else 0


def model_states(
    num_parameters: float,
    num_trained: float,
    weight_bytes: int,
    zero_stage: int,
    dp: int,
    sharding: Sharding,
    *,
    float32_sums: bool = False,
) -> tuple[float, float, float]:
    """(weights, gradients, optimizer states) in bytes on one of `dp` devices.

    Rajbhandari et al. 2020, figure 1, with Ψ parameters, all trained, gradients as wide as weights and K bytes of
    optimizer states: together (2w + K)·Ψ; stage 1 shards the optimizer, 2w·Ψ + K·Ψ/dp; stage 2 gradients too,
    w·Ψ + (w + K)·Ψ/dp; stage 3 weights too, (2w + K)·Ψ/dp.
    """
    weights = num_parameters * weight_bytes / (dp if zero_stage >= 3 else 1)
    gradients = num_trained * gradient_bytes(weight_bytes, zero_stage, float32_sums) / (dp if zero_stage >= 2 else 1)
    optimizer = num_trained * optimizer_bytes(weight_bytes, zero_stage, sharding) / (dp if zero_stage >= 1 else 1)
    return weights, gradients, optimizer


def gathered_bytes(
    shape: ModelShape,
    held: int,
    weight_bytes: int,
    zero_stage: int,
    dp: int,
    sharding: Sharding,
    *,
    offload: bool = False,
    ep: int = 1,
) -> int:
    """Level 3 gathers the parameters it computes with, of the `held` ones, and keeps those it needs again soon; of
    experts that `ep` ranks share, its own."""
    if zero_stage < 3 or (dp == 1 and not offload):
        return 0
    most = sharding.gathered_elements
    if sharding.gathered_layers is not None:
        most = held - max(0, shape.num_layers - sharding.gathered_layers) * shape.layer_parameters()
        if shape.experts is not None:
            layers = min(sharding.gathered_layers, shape.experts.num_layers)
            most -= layers * shape.experts.parameters // shape.experts.num_layers * (ep - 1) // ep
    return min(held, most) * weight_bytes


def summed_experts_bytes(
    shape: ModelShape, weight_bytes: int, ep: int, targets: Collection[str] | None, *, checkpointing: bool
) -> int:
    """The experts with their adapters, which a pass adds up, and the backward pass needs again."""
    if shape.experts is None or EXPERTS not in (targets or ()):
        return 0
    layers = 1 if checkpointing else shape.experts.num_layers
    one = 3 * shape.experts.number * shape.experts.width * shape.hidden_size
    # One layer's products B A exist beside the sums.
    return ceil_div((layers + 1) * one * weight_bytes, ep)
