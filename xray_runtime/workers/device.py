"""Which device `runtime.device: auto` means, where no cluster is at hand to ask."""

from __future__ import annotations

import shutil


def local_device(wanted: str) -> str:
    """ "cpu" or "cuda": with `auto`, CUDA where this machine has NVIDIA's driver. Imports no torch."""
    if wanted != "auto":
        return wanted
    return "cuda" if shutil.which("nvidia-smi") else "cpu"
