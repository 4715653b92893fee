"""Atomic writes, also across a power failure, and links in place of copies."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path


def sync(path: Path) -> None:
    """Flush a file or a directory's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a temporary file, flush it to disk and rename it to `path`: readers find the old file or the new one.

    `mode`, less the umask, holds from the first byte on.
    """
    temporary = path.with_name(f"{path.name}.writing-{uuid.uuid4().hex[:8]}")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Hard-link a file that is never modified; copy it where the file system has no links, or to another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
