"""The signed log as the processes of a run may rely on it: whole, and signed with keys that are trusted.

`log.view` reads what an intruder may have appended as well: it is for pages and for an audit, which says so.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from xray_runtime.errors import first_line
from xray_runtime.lineage.keys import trusted_keys
from xray_runtime.lineage.log import LOG, LogView, read_lines
from xray_runtime.lineage.signed_lines import sound_lines
from xray_runtime.lineage.signing import TrustedKey, Verifier
from xray_runtime.store.checkpoints import read_bounded

log = logging.getLogger(__name__)

MAX_BYTES = 2**30
"""The size of a record: metrics of a long run have some 100 MB."""


def trusted_view(output: Path) -> LogView:
    """The state that the log describes up to the first entry that is not sound; empty without a trusted key."""
    try:
        keys = tuple(trusted_keys(output))
        status = os.lstat(output / LOG)
        verifier = _verifier(keys, tuple(key.sha256 for key in keys))
    except (OSError, ValueError):
        return LogView()
    # The time of the last change cannot be set by whoever writes the file.
    return _view_at(output, (status.st_ino, status.st_size, status.st_ctime_ns), verifier)


def read_logged(output: Path, path: Path, limit: int = MAX_BYTES) -> bytes | None:
    """The bytes of a file below `output` if they are those that the log names; None with a warning if not.

    They are read once: what is parsed is what was checked.
    """
    try:
        content = read_bounded(path, limit)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s; it is not used", first_line(error))
        return None
    if trusted_view(output).files.get(path.relative_to(output).as_posix()) == hashlib.sha256(content).hexdigest():
        return content
    log.warning("%s: not what was signed; it is not used", path)
    return None


class _Remembering(Verifier):
    """Checks each line once: the log grows all the time, and its lines never change."""

    def __init__(self, trusted: Sequence[TrustedKey]) -> None:
        super().__init__(trusted)
        self._known: dict[tuple[bytes, str | None], str] = {}

    def check_envelope(self, text: bytes, made: str | None = None) -> str:
        line = hashlib.sha256(text).digest(), made
        if line not in self._known:
            self._known[line] = super().check_envelope(text, made)
        return self._known[line]


@functools.lru_cache(maxsize=8)
def _verifier(keys: tuple[TrustedKey, ...], sha256s: tuple[str, ...]) -> Verifier:
    return _Remembering(keys)


@functools.lru_cache(maxsize=4)
def _view_at(output: Path, state: tuple[int, ...], verifier: Verifier) -> LogView:
    found = LogView()
    with contextlib.suppress(OSError, ValueError):
        for line in sound_lines(read_lines(output), verifier):
            found.add(line)
    return found
