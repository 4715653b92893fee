"""Machines as the planner sees them: devices, memory, cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import psutil

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.cores import usable_cores
from xray_runtime.kernel.gpus import has_driver

GIB = 2**30


USABLE = 0.9
"""Share of a device's memory that a plan may use; the rest is for fragmentation, communication and other processes."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`num_devices` equal devices with `memory_bytes` each: GPUs, or CPU cores with their share of RAM."""

    num_devices: int
    memory_bytes: int
    device: Literal["cpu", "cuda"] = "cuda"
    devices_per_node: int | None = None
    """None: all on one node."""

    @property
    def usable_bytes(self) -> int:
        return int(USABLE * self.memory_bytes)

    @property
    def node_size(self) -> int:
        """Number of devices of one node."""
        return self.devices_per_node or self.num_devices


def this_machine(device: str = "auto", threads: int = 1) -> Machine:
    """This machine: its CUDA devices, or else devices of `threads` cores each with equal shares of RAM.

    Raises:
        ConfigError: `device` is "cuda" and there is none.
    """
    if device == "cuda" or (device == "auto" and has_driver()):
        import torch

        if torch.cuda.is_available():
            memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
            return Machine(num_devices=torch.cuda.device_count(), memory_bytes=memory)
        if device == "cuda":
            raise ConfigError(
                'runtime.device: "cuda" is not allowed: this machine has no GPU (to plan for another machine, set '
                "--devices and --memory-gib)"
            )
    count = max(usable_cores() // threads, 1)
    return Machine(num_devices=count, memory_bytes=psutil.virtual_memory().total // count, device="cpu")


def local_node(machine: Machine) -> dict[str, float]:
    """CPUs and GPUs of a Ray cluster on this machine."""
    return {"CPU": float(usable_cores()), "GPU": float(machine.num_devices if machine.device == "cuda" else 0)}
