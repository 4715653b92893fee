"""The fields of a layout under FSDP2."""

from __future__ import annotations

from typing import Literal

from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.kernel.config.section import UnitInterval


class FSDP2Config(EngineConfig):
    """Training with torch's `fully_shard` over the data-parallel Workhorses."""

    library: Literal["fsdp2"] = "fsdp2"
    """FSDP2."""
    zero_stage: Literal[2, 3] = 3
    """Weights, gradients and optimizer states are sharded. 3: a layer's weights are gathered for each pass through it;
    2: they stay gathered from the forward to the backward pass, which takes more memory and less communication."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` steps the matrices between hidden states (Jordan et al. 2024), and AdamW embeddings, output layer, norms,
    biases and experts. Its steps are scaled to AdamW's size (Liu et al. 2025), so that `lr` serves both."""
    muon_momentum: UnitInterval = 0.95
    """Decay rate of Muon's momentum, which is Nesterov's."""

    @property
    def sharding_level(self) -> int:
        return self.zero_stage

    @property
    def least_sharding_level(self) -> int:
        return 2
