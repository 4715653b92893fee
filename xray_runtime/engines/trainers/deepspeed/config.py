"""The fields of a layout under DeepSpeed."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from xray_runtime.engines.layouts import EngineConfig


class DeepSpeedConfig(EngineConfig):
    """Training with DeepSpeed's ZeRO over the data-parallel Workhorses."""

    library: Literal["deepspeed"] = "deepspeed"
    """DeepSpeed."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    """ZeRO stage: 0 replicates, 1 shards optimizer states, 2 also gradients, 3 also parameters. None: the lowest stage
    that the other fields allow; `bfloat16` needs 1 or higher, even on one Workhorse, so `precision: auto` is `float32`
    with 0."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """`cpu`: keep optimizer states, and with zero_stage 3 weights, in host memory (ZeRO-Offload); `nvme`: in files
    under nvme_path (ZeRO-Infinity). Results differ only in float rounding. `cpu` needs zero_stage 1 or higher, `nvme`
    needs 3 and CUDA."""
    nvme_path: Annotated[str, Field(min_length=1)] | None = None
    """Directory on every node's local disk, for offload 'nvme'. Files of ended processes in it are removed."""

    @model_validator(mode="after")
    def _offload(self) -> Self:
        if (self.offload == "nvme") != (self.nvme_path is not None):
            path = "null" if self.nvme_path is None else repr(self.nvme_path)
            raise ValueError(
                f"nvme_path = {path} is not allowed with offload = {self.offload!r}: set it for 'nvme' only"
            )
        return self

    @property
    def least_sharding_level(self) -> int:
        """DeepSpeed's ZeRO 0 sums gradients in bfloat16, and only ZeRO 3 offloads to disk."""
        return 3 if self.offload == "nvme" else int(self.offload != "none" or self.precision == "bfloat16")

    @property
    def sharding_level(self) -> int:
        """`zero_stage`, or the lowest possible stage if that is None."""
        return self.least_sharding_level if self.zero_stage is None else self.zero_stage

    def check_written(self) -> None:
        """Raises ValueError if `zero_stage` is too low for the other fields."""
        if self.sharding_level < self.least_sharding_level:
            field = "precision" if self.offload == "none" else "offload"
            raise ValueError(
                f"zero_stage = {self.sharding_level} must be at least {self.least_sharding_level} with {field} = "
                f"{getattr(self, field)!r}"
            )

    def offloads(self, device: str) -> bool:
        # On a CPU, device memory is host memory.
        return self.offload not in (("none", "cpu") if device == "cpu" else ("none",))

    def automatic_precision(self, device: str) -> Literal["float32", "bfloat16"]:
        return "float32" if self.zero_stage == 0 else super().automatic_precision(device)
