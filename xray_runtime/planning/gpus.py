"""Peak rates of common GPUs, from their makers' data sheets: the input of the cost model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU. Rates are peaks; `cost.py` states which share of them it assumes."""

    name: str
    memory_bytes: int
    """Memory that the driver reports."""
    half_flops: float
    """Dense bfloat16 FLOP/s with float32 sums."""
    single_flops: float
    """float32 FLOP/s without TF32."""
    memory_rate: float
    """Bytes/s of its own memory."""
    peer_rate: float
    """Bytes/s to another GPU of the node, in each direction: NVLink, or PCIe."""
    network_rate: float
    """Bytes/s to another node, in each direction: each GPU's share of the node's network."""
    host_rate: float
    """Bytes/s to host memory, in each direction."""


GPUS = (
    Gpu(
        name="L4",
        memory_bytes=23_034 * MIB,
        half_flops=121e12,
        single_flops=30e12,
        memory_rate=300e9,
        peer_rate=32e9,
        network_rate=3e9,
        host_rate=32e9,
    ),
    Gpu(
        name="L40S",
        memory_bytes=46_068 * MIB,
        half_flops=362e12,
        single_flops=92e12,
        memory_rate=864e9,
        peer_rate=32e9,
        network_rate=12.5e9,
        host_rate=32e9,
    ),
    Gpu(
        name="H100",
        memory_bytes=81_559 * MIB,
        half_flops=989e12,
        single_flops=67e12,
        memory_rate=3.35e12,
        peer_rate=450e9,
        network_rate=50e9,
        host_rate=64e9,
    ),
    Gpu(
        name="H200",
        memory_bytes=143_771 * MIB,
        half_flops=989e12,
        single_flops=67e12,
        memory_rate=4.8e12,
        peer_rate=450e9,
        network_rate=50e9,
        host_rate=64e9,
    ),
)
"""24, 48, 80 and 141 GB. A 24 GB card is taken to be an L4, the slowest of them."""


@cache
def gpu_of(memory_bytes: int) -> Gpu:
    """The known GPU whose memory is nearest to `memory_bytes`."""
    return min(GPUS, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))
