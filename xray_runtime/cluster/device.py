"""The device of `runtime.device: auto` on this machine, without a cluster."""

from __future__ import annotations

from xray_runtime.kernel.gpus import has_driver


def local_device(wanted: str) -> str:
    """ "cpu" or "cuda"; "auto" is CUDA if this machine has NVIDIA's driver. Imports no torch."""
    if wanted != "auto":
        return wanted
    return "cuda" if has_driver() else "cpu"
