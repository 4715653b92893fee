"""The cores of this machine: the number this process may use, and the load on them."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path


def usable_cores() -> int:
    """Number of cores that this process may use: its affinity, and a container's quota if there is one."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(math.ceil(int(quota) / int(period)), 1))
    return cores


def load() -> float:
    """Number of runnable processes per core, at least 1: how many times longer everything takes on a busy machine.

    Multiply time limits for slow processes by it.
    """
    return max(os.getloadavg()[0] / usable_cores(), 1.0)


def give_way(niceness: int) -> None:
    """Lower the priority of this process with all its threads; it cannot raise it again."""
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, thread, max(niceness, os.getpriority(os.PRIO_PROCESS, thread)))
