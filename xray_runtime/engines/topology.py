"""The ranks of a model as points of a pipeline × data × sequence × tensor grid.

Tensor-parallel peers, which communicate most, have neighbouring ranks; then come sequence-parallel ones, which exchange
their activations in every layer, then data-parallel ones, then stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from xray_runtime.engines.layouts import LayoutConfig


@dataclass(frozen=True)
class Topology:
    """Number of ranks along each axis."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    sequence: int = 1

    @classmethod
    def of(cls, layout: LayoutConfig) -> Self:
        return cls(layout.tensor_parallel, layout.pipeline_parallel, layout.data_parallel, layout.sequence_parallel)

    @property
    def size(self) -> int:
        return self.tensor * self.pipeline * self.data * self.sequence

    @property
    def is_split(self) -> bool:
        """Whether a rank holds less than a whole replica."""
        return self.tensor * self.pipeline > 1

    def rank(self, stage: int, data: int, tensor: int, sequence: int = 0) -> int:
        """The rank at a point of the grid."""
        return ((stage * self.data + data) * self.sequence + sequence) * self.tensor + tensor

    def stage(self, rank: int) -> int:
        return rank // (self.data * self.sequence * self.tensor)

    def data_rank(self, rank: int) -> int:
        """The shard of the rows for `rank`: the same for all ranks of a replica."""
        return rank // (self.sequence * self.tensor) % self.data

    def tensor_rank(self, rank: int) -> int:
        """The slice of split matrices that `rank` holds."""
        return rank % self.tensor

    def sequence_rank(self, rank: int) -> int:
        """The share of each row's tokens that `rank` computes."""
        return rank // self.tensor % self.sequence

    def reports(self, rank: int) -> bool:
        """Whether `rank` answers for its replica: the last stage's first slice, which has losses and scores."""
        return self.stage(rank) == self.pipeline - 1 and self.tensor_rank(rank) == self.sequence_rank(rank) == 0

    def layers(self, stage: int, num_layers: int) -> range:
        """The layers of a pipeline stage, as evenly as possible."""
        return range(num_layers * stage // self.pipeline, num_layers * (stage + 1) // self.pipeline)
