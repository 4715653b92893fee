"""Peak rates of common GPUs, from their makers' data sheets: the input of the cost model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

MIB = 2**20


@dataclass(frozen=True)
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
    # name, memory, half and single FLOP/s, rates of its memory, to a peer, to the network, to the host
    Gpu("L4", 23_034 * MIB, 121e12, 30e12, 300e9, 32e9, 3e9, 32e9),
    Gpu("L40S", 46_068 * MIB, 362e12, 92e12, 864e9, 32e9, 12.5e9, 32e9),
    Gpu("H100", 81_559 * MIB, 989e12, 67e12, 3.35e12, 450e9, 50e9, 64e9),
    Gpu("H200", 143_771 * MIB, 989e12, 67e12, 4.8e12, 450e9, 50e9, 64e9),
)
"""24, 48, 80 and 141 GB. A 24 GB card is taken to be an L4, the slowest of them."""


@cache
def gpu_of(memory_bytes: int) -> Gpu:
    """The known GPU whose memory is nearest to `memory_bytes`."""
    return min(GPUS, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))
