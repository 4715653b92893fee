"""Whether this machine has NVIDIA's driver, without CUDA: torch takes seconds to import, and a process that has asked
CUDA cannot fork."""

from __future__ import annotations

from pathlib import Path

SIGNS = ("proc/driver/nvidia/version", "dev/nvidia[0-9]*", "dev/dxg")
"""Patterns of files. WSL 2 has the last one alone, which is Windows's driver."""


def has_driver(root: Path = Path("/")) -> bool:
    """Whether one of the `SIGNS` is below `root`."""
    return any(any(root.glob(sign)) for sign in SIGNS)
