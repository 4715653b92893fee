"""The fields of a layout under Megatron-core."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xray_runtime.engines.layouts import EngineConfig


class MegatronConfig(EngineConfig):
    """Training with Megatron-core's layers, for Llama models. On CPU it supports tensor and data parallelism."""

    library: Literal["megatron"] = "megatron"
    """Megatron-core."""
    zero_stage: Annotated[int, Field(ge=0, le=1)] | None = None
    """1: its distributed optimizer, which shards optimizer states and needs CUDA. None: 0."""

    @property
    def sharding_level(self) -> int:
        return self.zero_stage or 0
