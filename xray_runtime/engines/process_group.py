"""The process group of one model, by torch alone: NCCL on CUDA, gloo on CPU."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=30)
"""As long as gloo's: NCCL's own ten minutes would kill the ranks that wait before `runtime.collective_timeout_s` finds
the one that they wait for."""


def join(rank: int, world_size: int, host: str, port: int, device: torch.device) -> None:
    """Join the group of a model with `world_size` ranks, unless this process has joined its own group already."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world_size), MASTER_ADDR=host, MASTER_PORT=str(port)
    )
    if dist.is_initialized():
        return
    on_gpu = device.type == "cuda"
    # A group that is bound to its device makes smaller groups by splitting; one rank has no peers to split from.
    bound = torch.device("cuda", 0) if on_gpu and world_size > 1 else None
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT, device_id=bound)
