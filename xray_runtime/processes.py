"""Processes and their output: where noise goes, and how nothing outlives the run that started it."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def redirect_output(path: Path) -> None:
    """Append everything this process prints from now on, also from C code, to the file `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
