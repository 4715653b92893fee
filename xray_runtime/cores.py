"""The cores of this machine: how many this process may use, and how many others want them."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path


def usable_cores() -> int:
    """Cores this process may use: its affinity, and a container's quota where there is one."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(math.ceil(int(quota) / int(period)), 1))
    return cores


def load() -> float:
    """How many processes want each core, at least 1: on a busy machine everything takes so many times longer.

    Limits for processes that may only be slow are multiplied by it.
    """
    return max(os.getloadavg()[0] / usable_cores(), 1.0)


def give_way(niceness: int) -> None:
    """Have this process yield to other programs, all of its threads; it cannot take that back."""
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, thread, max(niceness, os.getpriority(os.PRIO_PROCESS, thread)))
