"""The processes of this machine as a tree, to count and end an agent's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

SET_DEATH_SIGNAL, SET_SUBREAPER = 1, 36
"""Options of prctl."""


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process; the kernel keeps both over exec, not over fork."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def children() -> dict[int, list[int]]:
    """Process → its children, of all processes."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The name in parentheses may hold anything.
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
                found.setdefault(int(fields[1]), []).append(int(name))
    return found


def descendants(of: dict[int, list[int]], pid: int) -> Iterator[int]:
    """All descendants of a process, parents first; `of` as from `children`."""
    for child in of.get(pid, ()):
        yield child
        yield from descendants(of, child)


def kill_tree(pid: int) -> None:
    """Kill a process of ours that was not reaped yet, after all its descendants."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        # A stopped process starts no others; its descendants may, until they are killed.
        killed = set[int]()
        # Parents first: the first process of a sandbox ends all others.
        while rest := [child for child in descendants(children(), pid) if child not in killed]:
            for child in rest:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            killed.update(rest)
        os.kill(pid, signal.SIGKILL)
