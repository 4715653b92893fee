"""The syntax of Python files, remembered between processes: parsing those of a lifecycle's keys takes seconds.

One file in the user's cache directory for each Python and each way to digest. A file's syntax is known while its path,
size, inode and both its times are the same, as for the digests of data (`digest_memory`). Where the memory cannot be
read or written, files are parsed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from xray_runtime.kernel.cache import cache_directory
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.store.digest_memory import SETTLED_S, FileState

Fields = list[Any]
"""The fields of a `Syntax`, as JSON has them."""


class SyntaxMemory:
    """Fields of the syntax of files, by their state.

    Args:
        path: of the memory, if it can be used.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._new = path, dict[str, tuple[list[Any], Fields]]()
        self._known = self._read()

    def recall(self, state: FileState) -> Fields | None:
        """The fields for a file in this very state, if they are known."""
        known_state, fields = self._known.get(state.path, (None, None))
        return fields if known_state == list(state[1:]) else None

    def remember(self, state: FileState, fields: Fields) -> None:
        """Remember a file that did not change within the last seconds; written by `keep`."""
        if time.time_ns() - state.ctime_ns > SETTLED_S * 1e9:
            self._new[state.path] = list(state[1:]), fields

    def keep(self) -> None:
        """Write what is new. Another process that writes meanwhile may lose it, which only costs time."""
        if not self._new or self._path is None:
            return
        self._known = {path: entry for path, entry in (self._read() | self._new).items() if os.path.exists(path)}
        self._new = {}
        with contextlib.suppress(OSError):
            write_atomic(self._path, json.dumps(self._known))

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            content = json.loads(self._path.read_bytes()) if self._path is not None else None
            if isinstance(content, dict):
                return content
        return {}


@cache
def syntax_memory(digested_by: Path) -> SyntaxMemory:
    """The user's memory of what the source `digested_by` makes of files with this Python."""
    try:
        digest = hashlib.sha256(digested_by.read_bytes()).hexdigest()
        return SyntaxMemory(cache_directory() / f"syntax-{sys.hexversion:x}-{digest[:12]}.json")
    except (OSError, RuntimeError):
        return SyntaxMemory(None)
