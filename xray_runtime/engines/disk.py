"""Directories for offloaded states on a node's disk.

Each engine has its own directory, since DeepSpeed would use the same file names for a policy and a critic. Its process
holds a lock there until it ends. Processes are killed and cannot clean up, so the next engine removes directories
without a held lock.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

PREFIX, LOCK = "xray-", ".lock"
_HELD: list[FileLock] = []
"""Locks of this process; a garbage-collected lock would be released."""


def own_directory(root: Path) -> Path:
    """A new directory under `root` for this process; removes directories of ended processes."""
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / LOCK):
        for other in root.glob(f"{PREFIX}*"):
            with contextlib.suppress(Timeout), FileLock(other / LOCK, timeout=0):
                shutil.rmtree(other)
        mine = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        _HELD.append(FileLock(mine / LOCK))
        _HELD[-1].acquire()
        return mine
