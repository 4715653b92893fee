"""The syntax of Python files, remembered between processes: parsing those of a lifecycle's keys takes seconds.

One file in the user's cache directory for each Python and each way to digest. A file's syntax is known while its bytes
are the same: unlike data (`digest_memory`), code is so small that reading it takes no longer than asking for its state,
and images of containers give every file one time. Where the memory cannot be read or written, or is damaged, files are
parsed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from xray_runtime.kernel.cache import cache_directory
from xray_runtime.kernel.files import write_atomic

Fields = list[Any]
"""The fields of a `Syntax`, as JSON has them."""


class SyntaxMemory:
    """Fields of the syntax of files, by the sha256 of their bytes.

    Args:
        path: of the memory, if it can be used.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._new = path, dict[str, tuple[str, Fields]]()
        self._known = self._read()

    def recall(self, path: Path, sha256: str) -> Fields | None:
        """The fields for a file with these bytes, if they are known."""
        known_sha256, fields = self._known.get(str(path), (None, None))
        return fields if known_sha256 == sha256 else None

    def remember(self, path: Path, sha256: str, fields: Fields) -> None:
        """Remember a file; written by `keep`."""
        self._new[str(path)] = sha256, fields

    def keep(self) -> None:
        """Write what is new. Another process that writes meanwhile may lose it, which only costs time."""
        if not self._new or self._path is None:
            return
        self._known = {path: entry for path, entry in (self._read() | self._new).items() if os.path.exists(path)}
        self._new = {}
        content = json.dumps(self._known).encode()
        with contextlib.suppress(OSError):
            write_atomic(self._path, _digest(content) + b"\n" + content)

    def _read(self) -> dict[str, Any]:
        """The entries that `keep` wrote; none if the file is damaged."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                digest, _, content = self._path.read_bytes().partition(b"\n")
                if digest == _digest(content):
                    return dict(json.loads(content))
        return {}


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


@cache
def syntax_memory(digested_by: Path) -> SyntaxMemory:
    """The user's memory of what the source `digested_by` makes of files with this Python."""
    try:
        sources = hashlib.sha256(digested_by.read_bytes() + Path(__file__).read_bytes()).hexdigest()
        return SyntaxMemory(cache_directory() / f"syntax-{sys.hexversion:x}-{sources[:12]}.json")
    except (OSError, RuntimeError):
        return SyntaxMemory(None)
