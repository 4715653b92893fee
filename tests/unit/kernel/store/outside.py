"""Files that lie outside."""

from __future__ import annotations

import os
from pathlib import Path

LONG_AGO = 1_600_000_000


def written(path: Path, content: bytes, time: int = LONG_AGO) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (time, time))
    return path
