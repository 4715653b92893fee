"""Who holds which part of a model: ranks as points of a pipeline × data × tensor grid.

Tensor-parallel peers have neighbouring ranks, since they talk most; then come data-parallel ones, then pipeline stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from xray_runtime.config.engines import LayoutConfig


@dataclass(frozen=True)
class Topology:
    """How many ranks lie along each axis."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @classmethod
    def of(cls, layout: LayoutConfig) -> Self:
        return cls(layout.tensor_parallel, layout.pipeline_parallel, layout.data_parallel)

    @property
    def size(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def cuts(self) -> bool:
        """Whether a rank holds less than a whole replica."""
        return self.tensor * self.pipeline > 1

    def rank(self, stage: int, data: int, tensor: int) -> int:
        """The rank at a point of the grid."""
        return (stage * self.data + data) * self.tensor + tensor

    def stage(self, rank: int) -> int:
        """Pipeline stage of `rank`."""
        return rank // (self.data * self.tensor)

    def data_rank(self, rank: int) -> int:
        """Which part of the rows `rank` gets: the same for every rank that holds a part of the same replica."""
        return rank // self.tensor % self.data

    def tensor_rank(self, rank: int) -> int:
        """Which slice of the split matrices `rank` holds."""
        return rank % self.tensor

    def reports(self, rank: int) -> bool:
        """Whether `rank` answers for its replica: the last stage's first slice, where losses and scores come out."""
        return self.stage(rank) == self.pipeline - 1 and self.tensor_rank(rank) == 0

    def layers(self, stage: int, num_layers: int) -> range:
        """The layers of a pipeline stage, as evenly as they go."""
        return range(num_layers * stage // self.pipeline, num_layers * (stage + 1) // self.pipeline)
