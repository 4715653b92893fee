"""How a generator gets adapters that are trained: as they are, or merged into their matrices."""

from __future__ import annotations

from typing import Literal

from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.training_config import check_sampled, unserved
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.plugs import unsupported
from xray_runtime.models.lora import LoRAConfig

AdapterSync = Literal["auto", "adapter", "merged"]
DIRECT = ("nccl", "ipc")
"""Weight transfers that do not go through host memory."""


def check_served(way: AdapterSync, lora: LoRAConfig | None, generator: GeneratorConfig) -> None:
    """Raises ValueError if the generator cannot compute adapters that it must get as they are."""
    if way != "adapter":
        return
    if lora is None:
        raise ValueError("adapter_sync = 'adapter' must be left out without lora")
    if (problem := unserved(lora, generator)) is not None:
        raise ValueError(problem)


def check_transfer(
    way: AdapterSync, lora: LoRAConfig | None, generator: GeneratorConfig, runtime: RuntimeConfig
) -> None:
    """Raises ValueError if `runtime.weight_transfer` cannot carry what is trained."""
    if way != "adapter":
        check_sampled(lora, generator, runtime)
    elif runtime.weight_transfer in DIRECT:
        where = f"runtime.weight_transfer = {runtime.weight_transfer!r}"
        raise ValueError(unsupported("adapter_sync = 'adapter'", where, why="adapters go through host memory"))


def synced_adapter(
    way: AdapterSync, lora: LoRAConfig | None, generator: GeneratorConfig, runtime: RuntimeConfig
) -> LoRAConfig | None:
    """The adapters that the generator gets as they are; None: it gets whole matrices."""
    if lora is None or way == "merged":
        return None
    direct = runtime.weight_transfer in DIRECT
    if way == "auto" and (direct or generator.precision(runtime.device) == "float32"):
        return None
    return lora if unserved(lora, generator) is None else None
