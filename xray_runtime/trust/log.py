"""Writing the signed log of an output directory, and other files of signed lines; see `kernel.evidence.log`.

`private` is everywhere the file of the signing key, by default that of the output directory.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import Field

from xray_runtime.kernel.evidence.envelope import EvidenceModel, InTotoRecord, sign
from xray_runtime.kernel.evidence.lines import LogRecord
from xray_runtime.kernel.evidence.log import END, LOG, digests, view
from xray_runtime.kernel.evidence.view import START, Decision, Left, Published, SignedEntry, lock
from xray_runtime.kernel.files import sync, write_atomic
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS
from xray_runtime.kernel.store.manifest import MANIFEST
from xray_runtime.trust.signing import signing_key


class LogEnd(EvidenceModel):
    """The log ends in the line whose digest the statement's subject has."""

    at: str


class EndRecord(InTotoRecord[LogEnd]):
    predicate_type: Literal["urn:xray:log-end:v1"] = Field(default="urn:xray:log-end:v1", alias="predicateType")


def append(
    output: Path,
    entry: SignedEntry,
    files: Mapping[str, str] | None = None,
    *,
    private: Path | None = None,
    locked: bool = False,
) -> None:
    """Sign an entry and write it to the end of the log: after a crash it is there whole or not at all.

    Args:
        files: path below `output` → sha256.
        locked: the caller holds the lock.
    """
    if isinstance(entry, Decision):
        files = {f"{entry.name}/{entry.version}": entry.checkpoint}
    private = private or signing_key(output)
    with contextlib.nullcontext() if locked else lock(output, "log"):
        line = append_line(output, output / LOG, LogRecord, entry, files or {}, private=private)
        # After a crash before this, it names the line before.
        end = EndRecord.of(LogEnd(at=_now()), {LOG: hashlib.sha256(line).hexdigest()})
        write_atomic(output / END, sign(end, private.read_bytes()))


def decide(output: Path, *, by: str | None = None, private: Path | None = None, **fields: Any) -> None:
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
            append(output, decision, private=private, locked=True)


def log_checkpoints(
    output: Path,
    checkpoints: Mapping[str, str],
    files: Mapping[str, str] | None = None,
    *,
    here: bool,
    renew: bool = False,
    private: Path | None = None,
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
                append(output, entry, new | manifest, private=private, locked=True)


def log_files(output: Path, paths: list[Path], note: str, *, private: Path | None = None) -> None:
    """Log files that were just written for people, unless the log lists the same."""
    files = digests(output, paths)
    with lock(output, "log"):
        if not files.items() <= view(output).files.items():
            append(output, Left(note=note), files, private=private, locked=True)


def sign_line(
    output: Path,
    record: type[InTotoRecord[Any]],
    entry: SignedEntry,
    files: Mapping[str, str],
    *,
    private: Path | None = None,
    previous: str = START,
) -> bytes:
    """A line as `append_line` writes it, after the line with the digest `previous`."""
    dated = entry.model_copy(update={"previous": previous, "at": _now()})
    # A statement needs a subject: an entry without files is about the line before, which has no name.
    content = record.of(dated, dict(sorted(files.items())) or {"": previous})
    return sign(content, (private or signing_key(output)).read_bytes())


def append_line(
    output: Path,
    path: Path,
    record: type[InTotoRecord[Any]],
    entry: SignedEntry,
    files: Mapping[str, str],
    *,
    private: Path | None = None,
) -> bytes:
    """Sign an entry and write it to the end of a file: after a crash it is there whole or not at all. Returns the line.

    Args:
        record: the kind of statement that lines of this file are.
        entry: one of its predicates; its `previous` and `at` are set here.
        files: name → sha256 of the subjects.
    """
    # A link is not followed.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "r+b") as file:
        end, last = _whole_end(file)
        previous = hashlib.sha256(last).hexdigest() if last else START
        line = sign_line(output, record, entry, files, private=private, previous=previous)
        # Overwrite a line that a power cut left half written.
        file.truncate(end)
        file.seek(end)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    if end == 0:
        sync(path.parent)
    return line


def _whole_end(file: BinaryIO) -> tuple[int, bytes]:
    """(where the last whole line ends, that line), read from the end of the file."""
    position, tail = file.seek(0, os.SEEK_END), b""
    while position > 0 and tail.count(b"\n") < 2:
        step = min(position, 1 << 16)
        position = file.seek(position - step)
        tail = file.read(step) + tail
    complete = tail[: tail.rfind(b"\n") + 1]
    return position + len(complete), complete[complete.rfind(b"\n", 0, -1) + 1 :]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
