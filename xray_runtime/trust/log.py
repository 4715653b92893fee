"""Writing the signed log of an output directory; see `kernel.evidence.log`."""

from __future__ import annotations

import getpass
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xray_runtime.kernel.evidence.lines import LogRecord
from xray_runtime.kernel.evidence.log import END, LOG, digests, view
from xray_runtime.kernel.evidence.view import Decision, Left, Published, SignedEntry, lock
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS
from xray_runtime.kernel.store.manifest import MANIFEST
from xray_runtime.trust.signed_lines import append_signed_line
from xray_runtime.trust.signing import envelope

END_TYPE = "application/vnd.xray.log-end+json"


def append(output: Path, private: Path, entry: SignedEntry, files: Mapping[str, str] | None = None) -> None:
    """Sign an entry and write it to the end of the log: after a crash it is there whole or not at all.

    Args:
        files: path below `output` → sha256.
    """
    with lock(output, "log"):
        append_locked(output, private, entry, files)


def append_locked(output: Path, private: Path, entry: SignedEntry, files: Mapping[str, str] | None = None) -> None:
    """As `append`, for a caller that holds the lock."""
    if isinstance(entry, Decision):
        files = {f"{entry.name}/{entry.version}": entry.checkpoint}
    line = append_signed_line(output / LOG, LogRecord, entry, files or {}, private)
    # After a crash before this, it names the line before.
    end = json.dumps({"type": "urn:xray:log-end:v1", "sha256": hashlib.sha256(line).hexdigest()})
    write_atomic(output / END, envelope(end.encode(), END_TYPE, private) + "\n")


def decide(output: Path, private: Path, *, by: str | None = None, **fields: Any) -> None:
    """Append a decision; the same registration twice in a row is one.

    Args:
        by: who decides; by default the user of this process.
        fields: of a `Decision`.
    """
    decision = Decision(by=by or getpass.getuser(), **fields)
    with lock(output, "log"):
        last = view(output).decided.get((decision.name, decision.alias)) if decision.action == "register" else None
        facts = {"version", "checkpoint", "evidence", "page"}
        if last is None or last.model_dump(include=facts) != decision.model_dump(include=facts):
            append_locked(output, private, decision)


def log_checkpoints(
    output: Path,
    private: Path,
    checkpoints: Mapping[str, str],
    files: Mapping[str, str] | None = None,
    *,
    here: bool,
    renew: bool = False,
) -> None:
    """Log that checkpoints are in the store, unless the log says so already.

    Args:
        checkpoints: directory → sha256.
        files: of the one checkpoint there is, as `digests` gives them.
        here: whether they were computed in this directory.
        renew: whether `files` were just written. Otherwise files in the log keep their digest: a later edit by somebody
            else is not signed.
    """
    with lock(output, "log"):
        known = view(output)
        new = {
            name: sha
            for name, sha in (files or {}).items()
            if name not in known.files or (renew and known.files[name] != sha)
        }
        for directory, sha256 in checkpoints.items():
            logged = known.published.get(directory)
            if new or logged is None or logged.checkpoint != sha256:
                entry = Published(action="publish" if here else "bring", directory=directory, checkpoint=sha256)
                manifest = {f"{CHECKPOINTS}/{directory}/{MANIFEST}": sha256}
                append_locked(output, private, entry, new | manifest)


def log_files(output: Path, private: Path, paths: list[Path], note: str) -> None:
    """Log files that were just written for people, unless the log lists the same."""
    files = digests(output, paths)
    with lock(output, "log"):
        if not files.items() <= view(output).files.items():
            append_locked(output, private, Left(note=note), files)
