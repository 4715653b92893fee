"""ZeRO-3's partition of parameters as they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Partition:
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
