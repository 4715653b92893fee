"""Abilities of engines, as data, and the one place that says that something is not supported with an engine.

The planner leaves out what cannot be, checks of a config ask before anything starts, and the site's page of engines
prints the tables.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

Transport = Literal["plasma", "nccl", "ipc"]
"""How weights go to a generator: through host memory, or from GPU to GPU."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The cost in memory of sharding over data-parallel ranks, for the planner: levels as ZeRO's stages (0 nothing, 1
    optimizer states, 2 gradients too, 3 weights too)."""

    levels: tuple[int, ...]
    """The levels that there are."""
    split_levels: tuple[int, ...] = (0,)
    """Those of a model that is also split by tensor or pipeline parallelism."""
    bucket_elements: int = 0
    """Most elements of the buffer in which gradients are reduced, from level 1 on."""
    gathered_elements: int = 1_000_000_000
    """Most parameters that level 3 keeps gathered."""
    gathered_layers: int | None = None
    """Level 3 gathers so many layers at a time, and the embeddings and the output layer; None: as many parameters as
    `gathered_elements` says, whatever their layer."""
    copies_float32: bool = False
    """From level 1 on, float32 weights have a float32 copy that the optimizer steps."""
    keeps_gradients: bool = False
    """Between steps level 3 keeps gradients and the buffer, and level 1 the float32 sums of half-precision ones."""


@dataclass(frozen=True, kw_only=True)
class TrainerCapabilities:
    """Abilities of a trainer."""

    tensor_parallel: bool = False
    """Ranks share each layer's matrices."""
    pipeline_parallel: bool = False
    """Ranks share the layers."""
    expert_parallel: bool = False
    """Ranks share each layer's experts."""
    sequence_parallel: bool = False
    """Ranks share the tokens of each row; it sums gradients over them as over data-parallel ranks."""
    routes: bool = False
    """Given experts may replace those that routers choose, on models that are whole or sharded over data-parallel
    ranks."""
    activation_checkpointing: bool = False
    """Activations are computed again in the backward pass."""
    lora: bool = False
    """Adapters, under each of its kinds of parallelism."""
    quantized: bool = False
    """The matrices below adapters may be held in four bits."""
    trainable_layers: bool = False
    """The top layers alone, above a frozen trunk."""
    scoring: bool = False
    """It shards models that only score, too: `frozen.library`."""
    on_cpu: Mapping[str, Collection[object]] = field(default_factory=dict)
    """Field of its config → the values that work on CPU, where not all do."""
    tensor_divides: tuple[str, ...] = ()
    """Sizes of a model, beside its heads, that the tensor-parallel degree must divide."""
    pipeline_divides: tuple[str, ...] = ()
    """Sizes of a model that the number of pipeline stages must divide."""
    sharding: Sharding | None = None
    """The cost of its sharding; None: the planner does not know it, and `runtime.parallel: auto` refuses it."""
    offload: bool = False
    """Optimizer states may live in host memory."""
    pictures: bool = False
    """It trains models that read pictures, whole on every rank; up to level 2 their states are sharded."""


@dataclass(frozen=True, kw_only=True)
class GeneratorCapabilities:
    """Abilities of a generator."""

    tensor_parallel: bool = False
    """Workhorses share a model."""
    remote: bool = False
    """The model runs elsewhere: a Workhorse is its client and takes no device, and nothing is planned for it."""
    sleep: bool = False
    """It releases its GPU's memory while it waits."""
    transports: tuple[Transport, ...] = ("plasma",)
    """The ways in which it receives weights."""
    fused_layers: tuple[frozenset[str], ...] = ()
    """Linear layers that it holds as one, so that a transfer from GPU to GPU must bring them together."""
    bfloat16_on_gpu: bool = False
    """It computes in bfloat16 on GPUs; others in float32 everywhere."""
    adapters: bool = False
    """It computes adapters beside the frozen weights, so that a sync brings these alone."""
    adapter_rank: int = 0
    """The highest rank of such adapters."""
    dora: bool = False
    """It computes DoRA's norms, too."""
    expert_adapters: bool = False
    """It computes adapters of a mixture's experts, too."""
    own_models: bool = False
    """It has its own implementation of each family, so that one that was never tried is tried first."""
    pictures: bool = False
    """Prompts may have pictures."""
    routes: tuple[Literal["cpu", "cuda"], ...] = ()
    """The devices on which it says which experts it chose for each token, in which order and with which weights."""
    top_logprobs: int = 0
    """Most of the likeliest tokens at each place that it reports, with their log-probabilities in the distribution that
    it samples from."""
    memory_pool: bool = False
    """It has an allocator for GPU memory that can be moved to the host and back, which trained models use as well."""
