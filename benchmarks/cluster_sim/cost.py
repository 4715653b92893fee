"""Seconds of the calls of one model: a role → seconds. This estimate is a roofline of H100s; another may replace it.

Sources: 6 operations a parameter and trained token, 2 a scored one (Kaplan et al. 2020, §2.1); decoding reads all
weights once a step (Pope et al. 2022, §2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Call = Literal["train", "score", "generate", "export", "load", "snapshot"]
FLOPS, BYTES_PER_S = 989e12, 3.35e12
"""An H100's dense bfloat16 operations and memory bandwidth, a second."""
MFU, BANDWIDTH_SHARE = 0.4, 0.6
"""Share of the operations that training and scoring reach, and of the bandwidth that decoding reaches."""
WIRE_BYTES_PER_S, DISK_BYTES_PER_S = 25e9, 2e9
"""Bandwidth of a node's network, and of a rank's share of the disk."""
WEIGHT_BYTES, STATE_BYTES = 2, 14
"""Bytes of a parameter on the wire and in a snapshot: bfloat16 weights, float32 masters and two moments."""


@dataclass(frozen=True)
class Part:
    """One model on its GPUs."""

    num_parameters: float
    num_gpus: int
    """GPUs of the whole model; a generator counts those of all replicas."""
    num_replicas: int = 1


class Cost(Protocol):
    """Seconds of one call, over all ranks at once."""

    def __call__(self, part: Part, call: Call, tokens: int, longest: int) -> float:
        """`tokens`: of all rows; `longest`: of the longest reply."""


def roofline(part: Part, call: Call, tokens: int, longest: int) -> float:
    """The estimate of this module; see `Cost`."""
    n, gpus = part.num_parameters, part.num_gpus
    if call in ("train", "score"):
        return (6 if call == "train" else 2) * n * tokens / (gpus * FLOPS * MFU)
    if call == "generate":
        steps = WEIGHT_BYTES * n / (gpus / part.num_replicas * BYTES_PER_S * BANDWIDTH_SHARE)
        return longest * steps + 2 * n * tokens / (gpus * FLOPS * MFU)
    if call == "snapshot":
        return STATE_BYTES * n / gpus / DISK_BYTES_PER_S
    # A node's network brings all weights to, or takes them from, its GPUs.
    return WEIGHT_BYTES * n / WIRE_BYTES_PER_S
