"""Where an engine keeps offloaded states on its node's disk.

Each engine has a directory of its own: DeepSpeed gives the files of a policy and of a critic under one path the same
names. Its process holds a lock on it, and whoever comes next removes what nobody holds: processes are ended by killing.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "xray-"


def own_directory(root: Path) -> Path:
    """A new directory under `root`, this process's until it ends; those of ended processes are removed."""
    root.mkdir(parents=True, exist_ok=True)
    turn = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(turn, fcntl.LOCK_EX)
        for other in root.glob(f"{PREFIX}*"):
            held = os.open(other, os.O_RDONLY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            else:
                shutil.rmtree(other)
            finally:
                os.close(held)
        mine = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        # Left open: the lock goes with the process, however that ends.
        fcntl.flock(os.open(mine, os.O_RDONLY), fcntl.LOCK_EX)
        return mine
    finally:
        os.close(turn)
