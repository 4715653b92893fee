"""The directory of what only saves time, and is made again when it is lost."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/xray` (`~/.cache/xray`), which only this user may write: a database with triggers would infect
    all that are copied from it. Raises OSError, or RuntimeError without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    directory = (Path(base) if base else Path.home() / ".cache") / "xray"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{directory} can be written by others")
    return directory
