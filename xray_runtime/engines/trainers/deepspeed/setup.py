"""DeepSpeed's import, process group, options and partition of parameters."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xray_runtime.engines.disk import own_directory
from xray_runtime.engines.trainers.deepspeed.config import DeepSpeedConfig

REDUCE_BUCKET = 500_000_000
"""Largest number of gradient elements in buckets at a time."""


def check_offload(engine: DeepSpeedConfig) -> None:
    """Raises ValueError if this node lacks a library for `engine.offload`."""
    if engine.offload == "nvme":
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible():
            raise ValueError(
                "engine.offload = 'nvme' needs libaio and its headers (libaio-dev), which are not installed"
            )


def offload(engine: DeepSpeedConfig) -> dict[str, Any]:
    """DeepSpeed's options for `engine.offload`."""
    if engine.offload == "none":
        return {}
    place: dict[str, str] = {"device": engine.offload}
    if engine.nvme_path is not None:
        place["nvme_path"] = str(own_directory(Path(engine.nvme_path)))
    return {"offload_optimizer": place} | ({"offload_param": place} if engine.sharding_level == 3 else {})


def communication(device: str, num_trained: int) -> dict[str, Any]:
    """ZeRO's options for the reduction of `num_trained` gradients: on GPUs during the backward pass."""
    overlap = device == "cuda"
    # DeepSpeed allocates the whole bucket, 2 GB for its default, however small the model; two buckets to overlap.
    bucket = min(REDUCE_BUCKET // 2 if overlap else REDUCE_BUCKET, num_trained)
    return {"overlap_comm": overlap, "reduce_bucket_size": bucket}


def mixed_precision(engine: DeepSpeedConfig) -> dict[str, Any]:
    """DeepSpeed's options for `engine.precision`."""
    if engine.precision == "float32":
        return {}
    # Sums over micro-batches and ranks are float32. Unchecked, ZeRO 1 and 2 use gradients that are not finite.
    return {
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }


def load_deepspeed(device: str) -> Any:
    """Import DeepSpeed with the settings that it reads at import."""
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # An unused operator (it needs LOCAL_SIZE). Its build takes a minute, and a rank killed meanwhile leaves a lock that
    # blocks every Workhorse on the machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def join_group(device: str) -> None:
    """Have DeepSpeed use the process group that this process has joined."""
    deepspeed = load_deepspeed(device)
    deepspeed.init_distributed("nccl" if device == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False)


def release_model(engine: Any) -> None:
    """Remove DeepSpeed's references to a model, by which a process would keep every model that it has trained: gradient
    hooks, which hold it from C++, where Python's collector does not find them, and ZeRO-3's list and cache."""
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator as coordinator

    engine.destroy()
    parameter_offload.FWD_MODULE_STACK.clear()
    cached = coordinator.PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    for cell in cached.__closure__:  # a wrapper of the function that `lru_cache` made
        getattr(cell.cell_contents, "cache_clear", lambda: None)()


class ZeroPartition:
    """ZeRO-3's partition of parameters over all ranks, as DeepSpeed's `config` says: leaves every rank its share."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        import deepspeed

        self._init = deepspeed.zero.Init(config_dict_or_path=config, dtype=dtype)
        # Whether ranks can fill in their shares by themselves: a share on disk is only written as it is split off.
        self.by_share = config["zero_optimization"].get("offload_param", {}).get("device") != "nvme"

    def __call__(self, parameter: Any, share: Callable[[int, int], Tensor] | None) -> None:
        if share is None:
            self._init._convert_to_zero_parameters([parameter])
            return
        # As DeepSpeed does, but without sending rank 0's values to all.
        self._init._convert_to_deepspeed_param(parameter)
        parameter.partition()
        size = parameter.ds_tensor.ds_numel
        parameter.ds_tensor.data.copy_(share(size * dist.get_rank(), size))
