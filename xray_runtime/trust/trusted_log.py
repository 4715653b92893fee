"""The signed log as the processes of a run may rely on it: whole, and signed with keys that are trusted.

`log.view` reads what an intruder may have appended as well: it is for pages and for an audit, which says so.
"""

from __future__ import annotations

import functools
from pathlib import Path

from xray_runtime.kernel.evidence.log import LOG, LogTail
from xray_runtime.kernel.evidence.view import LogView
from xray_runtime.trust.keys import trusted_keys
from xray_runtime.trust.signing import TrustedKey, Verifier


def trusted_view(output: Path) -> LogView:
    """The state that the log describes up to the first entry that is not sound; empty without a trusted key."""
    try:
        keys = tuple(trusted_keys(output))
        return _tail(output, keys, tuple(key.sha256 for key in keys)).view()
    except (OSError, ValueError):
        return LogView()


@functools.lru_cache(maxsize=4)
def _tail(output: Path, keys: tuple[TrustedKey, ...], sha256s: tuple[str, ...]) -> LogTail:
    """sha256s: of the keys, whose files may change."""
    return LogTail(output / LOG, Verifier(keys))
