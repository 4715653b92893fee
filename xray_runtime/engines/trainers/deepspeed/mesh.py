"""The process groups of one model, made from its topology. DeepSpeed uses a `Mesh` as its `mpu`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from xray_runtime.engines.process_group import TIMEOUT
from xray_runtime.engines.topology import Topology


class Mesh:
    """This rank's position in `topology`, and its process groups.

    Every rank makes every group in the same order, as `torch.distributed` requires. DeepSpeed uses the `get_*` methods
    to reduce gradients over data-parallel ranks and to sum norms over the parts of one replica.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology, self.rank = topology, dist.get_rank()
        self.stage = topology.stage(self.rank)
        self.data_rank, self.tensor_rank = topology.data_rank(self.rank), topology.tensor_rank(self.rank)
        stages, data, tensor = range(topology.pipeline), range(topology.data), range(topology.tensor)
        rank_at = topology.rank
        self.data_ranks = [rank_at(self.stage, d, self.tensor_rank) for d in data]
        self.data_group = self._group([rank_at(s, d, t) for d in data] for s in stages for t in tensor)
        self.tensor_group = self._group([rank_at(s, d, t) for t in tensor] for s in stages for d in data)
        self.replica_group = self._group([rank_at(s, d, t) for s in stages for t in tensor] for d in data)
        lines = [[rank_at(s, d, t) for s in stages] for d in data for t in tensor]
        # Activations and gradients have a group each: on one NCCL stream a send could wait for a receive.
        self.up_group, self.down_group = self._group(lines), self._group(lines)

    def _group(self, groups: Iterable[list[int]]) -> Any:
        mine = None
        for ranks in groups:
            group = dist.new_group(ranks, timeout=TIMEOUT)
            if self.rank in ranks:
                mine = group
        return mine

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.topology.pipeline - 1

    @property
    def turn(self) -> tuple[int, int]:
        """(number, count): this rank's place among those of its stage."""
        return self.data_rank * self.topology.tensor + self.tensor_rank, self.topology.data * self.topology.tensor

    def at_stage(self, stage: int) -> int:
        """The rank at another pipeline stage with the same rows and slice."""
        return self.topology.rank(stage, self.data_rank, self.tensor_rank)

    def get_data_parallel_group(self) -> Any:
        return self.data_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.data_ranks

    def get_data_parallel_world_size(self) -> int:
        return self.topology.data

    def get_data_parallel_rank(self) -> int:
        return self.data_rank

    def get_tensor_model_parallel_group(self) -> Any:
        return self.tensor_group

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.topology.tensor

    def get_tensor_model_parallel_rank(self) -> int:
        return self.tensor_rank

    def get_model_parallel_group(self) -> Any:
        return self.replica_group

    def get_model_parallel_world_size(self) -> int:
        return self.topology.tensor * self.topology.pipeline

    def get_model_parallel_rank(self) -> int:
        return self.stage * self.topology.tensor + self.tensor_rank
