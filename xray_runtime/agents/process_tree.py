"""The processes of this machine as a tree, to count and end an agent's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

SET_DEATH_SIGNAL, SET_SUBREAPER = 1, 36
"""Options of prctl."""


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process; the kernel keeps both over exec, not over fork."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def children() -> dict[int, list[int]]:
    """Process → its children, of all processes."""
    of_parent: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The name in parentheses may hold anything.
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
                of_parent.setdefault(int(fields[1]), []).append(int(name))
    return of_parent


def descendants(of: dict[int, list[int]], pid: int) -> Iterator[int]:
    """All descendants of a process, parents first; `of` as from `children`."""
    waiting = [pid]
    while waiting:
        below = of.get(waiting.pop(), [])
        yield from below
        waiting += below


def kill_trees(pids: Sequence[int]) -> None:
    """Kill processes of ours that were not reaped yet, each after all its descendants."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    # Stopped processes start no others; their descendants may, until they are killed.
    killed = set[int]()
    # All processes are listed once a round and not once a tree: an agent that forks leaves thousands of trees.
    while rest := [child for child in _below(pids) if child not in killed]:
        # Parents first: the first process of a sandbox ends all others.
        for child in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        killed.update(rest)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _below(pids: Sequence[int]) -> list[int]:
    of_parent = children()
    return [child for pid in pids for child in descendants(of_parent, pid)]
