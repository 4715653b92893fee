"""DeepSpeed's import, process group and options, and AdamW's parameter groups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xray_runtime.config.engines import EngineConfig
from xray_runtime.engines.training.disk import own_directory

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's two moments, as torch names them."""

REDUCE_BUCKET = 500_000_000
"""Largest number of gradient elements in buckets at a time."""


def check_offload(engine: EngineConfig) -> None:
    """Raises ValueError if this node lacks a library for `engine.offload`."""
    if engine.offload == "nvme":
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible():
            raise ValueError(
                "engine.offload = 'nvme' needs libaio and its headers (libaio-dev), which are not installed"
            )


def offload(engine: EngineConfig) -> dict[str, Any]:
    """DeepSpeed's options for `engine.offload`."""
    if engine.offload == "none":
        return {}
    place: dict[str, str] = {"device": engine.offload}
    if engine.nvme_path is not None:
        place["nvme_path"] = str(own_directory(Path(engine.nvme_path)))
    return {"offload_optimizer": place} | ({"offload_param": place} if engine.zero == 3 else {})


def communication(device: str, num_trained: int) -> dict[str, Any]:
    """ZeRO's options for the reduction of `num_trained` gradients: on GPUs during the backward pass."""
    overlap = device == "cuda"
    # DeepSpeed allocates the whole bucket, 2 GB for its default, however small the model; two buckets to overlap.
    bucket = min(REDUCE_BUCKET // 2 if overlap else REDUCE_BUCKET, num_trained)
    return {"overlap_comm": overlap, "reduce_bucket_size": bucket}


def mixed_precision(engine: EngineConfig) -> dict[str, Any]:
    """DeepSpeed's options for `engine.precision`."""
    if engine.precision == "float32":
        return {}
    # Sums over micro-batches and ranks are float32. Unchecked, ZeRO 1 and 2 use gradients that are not finite.
    return {
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's parameter groups: norms and biases are not decayed, as is usual for transformers."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    # ZeRO-3 keeps the shape of a partitioned parameter in `ds_shape`.
    matrices = {p for p in trainable if len(getattr(p, "ds_shape", p.shape)) >= 2}
    groups = [
        {"params": [p for p in trainable if p in matrices], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p not in matrices], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def load_deepspeed(device: str) -> Any:
    """Import DeepSpeed with the settings that it reads at import."""
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # An unused operator (it needs LOCAL_SIZE). Its build takes a minute, and a rank killed meanwhile leaves a lock that
    # blocks every Workhorse on the machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def init_collectives(rank: int, world_size: int, address: str, port: int, device: torch.device) -> None:
    """Join the process group of one model: NCCL on CUDA, gloo on CPU."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world_size), MASTER_ADDR=address, MASTER_PORT=str(port)
    )
    deepspeed = load_deepspeed(device.type)
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False)


def release_model(engine: Any) -> None:
    """Remove DeepSpeed's references to a model, by which a process would keep every model that it has trained: gradient
    hooks, which hold it from C++, where Python's collector does not find them, and ZeRO-3's list and cache."""
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator as coordinator

    engine.destroy()
    parameter_offload.FWD_MODULE_STACK.clear()
    cached = coordinator.PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    for cell in cached.__closure__:  # a wrapper of the function that `lru_cache` made
        getattr(cell.cell_contents, "cache_clear", lambda: None)()
