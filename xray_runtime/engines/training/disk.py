"""Where an engine keeps offloaded states on its node's disk.

Each engine has a directory of its own: DeepSpeed gives the files of a policy and of a critic under one path the same
names. Its process holds a lock in it until it ends, and the next engine removes directories whose lock nobody holds:
processes are ended by killing, so they cannot clean up themselves.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

PREFIX, LOCK = "xray-", ".lock"
_HELD: list[FileLock] = []
"""Locks that this process holds until it ends: a lock that is collected is released."""


def own_directory(root: Path) -> Path:
    """A new directory under `root`, this process's until it ends; those of ended processes are removed."""
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / LOCK):
        for other in root.glob(f"{PREFIX}*"):
            with contextlib.suppress(Timeout), FileLock(other / LOCK, timeout=0):
                shutil.rmtree(other)
        mine = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        _HELD.append(FileLock(mine / LOCK))
        _HELD[-1].acquire()
        return mine
