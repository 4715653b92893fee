"""What an audit has verified, so that the next may leave out what has not changed since.

    verified.json   of each checkpoint: its digest, its parents, and the state of every file and folder in it
    verified.sig    signed with the output directory's key

A state is type, size, inode and both times (of modification, and of the last change of the inode). Who writes to a file
through the file system changes the last, which cannot be set back. Not noticed is what goes round it: a clock set
back, a disk written to directly, bits that rot. So an audit leaves something out only where that was asked for.

The record counts only if a key that signs today signed it, and if it is of this directory, of this version of X-ray and
of the keys that are trusted now. Whoever puts an older one back makes the audit read more. Where the log ended then is
held against every later audit.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from xray_runtime.config.validation import ConfigError
from xray_runtime.files import write_atomic
from xray_runtime.lineage.graph import Graph
from xray_runtime.lineage.log import Head
from xray_runtime.lineage.provenance import package_digest
from xray_runtime.lineage.signing import TrustedKey, Verifier, has_signing_key, sign, signing_key
from xray_runtime.store.checkpoints import read_bounded
from xray_runtime.store.digest_memory import SETTLED_S
from xray_runtime.store.manifest import Sha256

RECORD, SIGNATURE = "verified.json", "verified.sig"
MAX_BYTES = 2**30
"""Of the record: some 400 bytes a checkpoint."""


class Entry(NamedTuple):
    """One checkpoint that was verified."""

    sha256: Sha256
    state: Sha256
    parents: list[Sha256]


class Record(BaseModel):
    """What was verified."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["urn:xray:verified:v1"] = "urn:xray:verified:v1"
    output: str
    package: Sha256
    """Of X-ray: another version may check more."""
    keys: dict[Sha256, str | None]
    """Every trusted key, and until when."""
    whole: str
    """When everything was last read."""
    checkpoints: dict[str, Entry]
    """By directory name."""
    log: str
    """The head of the log (`log.Head`)."""


@dataclass
class Since:
    """What an audit can leave out, and what it needs for a record of its own."""

    states: dict[str, str | None]
    """Of every checkpoint by its directory's name, before anything was read."""
    reason: str = ""
    """Why nothing is left out."""
    whole: str = ""
    """When everything was last read; empty where that is now."""
    unchanged: set[str] = field(default_factory=set)
    """Digests of the checkpoints that are left out."""
    head: Head | None = None
    """Where the log ended then."""


def read_since(output: Path, graph: Graph, trusted: Sequence[TrustedKey]) -> Since:
    """What has not changed since the last record; nothing, with the reason, where the record does not count."""
    # Before anything is read: what changes meanwhile has another state the next time.
    states = {node.directory.name: _state([node.directory]) for node in graph.nodes.values()}
    since = Since(states)
    try:
        record = _read(output, trusted)
        since.head = Head.parse(record.log)
        if record.output != str(output.resolve()):
            raise ValueError(f"{RECORD} is of {record.output}")
        if record.package != package_digest():
            raise ValueError("another version of X-ray made the last audit")
        if record.keys != _keys(trusted):
            raise ValueError("other keys were trusted at the last audit")
    except (OSError, ValueError, RecursionError) as error:
        since.reason = str(error).splitlines()[0]
        return since
    since.whole = record.whole
    for sha256, node in graph.nodes.items():
        entry = record.checkpoints.get(node.directory.name)
        if entry is not None and (entry.sha256, entry.state) == (sha256, states[node.directory.name]):
            since.unchanged.add(sha256)
    # Their model cards may be what an evaluation signed that is gone.
    gone = [entry for entry in record.checkpoints.values() if entry.sha256 not in graph.nodes]
    since.unchanged -= {parent for entry in gone for parent in entry.parents}
    return since


def last_head(output: Path, trusted: Sequence[TrustedKey]) -> Head | None:
    """Where the log ended when all was last found sound; None where no record that counts says so."""
    try:
        return Head.parse(_read(output, trusted).log)
    except (OSError, ValueError, RecursionError):
        return None


def write_since(output: Path, graph: Graph, trusted: Sequence[TrustedKey], since: Since, head: Head) -> str:
    """Record that all of this is sound; returns why it was not recorded, or nothing."""
    if not has_signing_key(output):
        return "the private key that would sign it is not here"
    try:
        private = signing_key(output)
    except ConfigError as error:
        return str(error)
    record = Record(
        output=str(output.resolve()),
        package=package_digest(),
        keys=_keys(trusted),
        whole=since.whole or datetime.now(UTC).isoformat(timespec="seconds"),
        checkpoints={
            node.directory.name: Entry(node.sha256, state, sorted(set(node.manifest.parents.values())))
            for node in graph.nodes.values()
            if (state := since.states.get(node.directory.name)) is not None
        },
        log=str(head),
    )
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / RECORD
        path.write_text(record.model_dump_json() + "\n", encoding="utf-8")
        sign(path, path.with_name(SIGNATURE), private)
        # Killed in between, the signature is of another record, and everything is read.
        for name in (RECORD, SIGNATURE):
            write_atomic(output / name, (Path(temporary) / name).read_bytes())
    return ""


def _read(output: Path, trusted: Sequence[TrustedKey]) -> Record:
    """The record. Raises ValueError or OSError where it does not count."""
    if not os.path.lexists(output / RECORD):
        raise ValueError("nothing was verified before")
    with tempfile.TemporaryDirectory() as temporary:
        # What is parsed is what was checked.
        for name in (RECORD, SIGNATURE):
            (Path(temporary) / name).write_bytes(read_bounded(output / name, MAX_BYTES))
        # Without a time: a key that was retired vouches for nothing here.
        Verifier(trusted).check(Path(temporary) / RECORD, Path(temporary) / SIGNATURE)
        try:
            record = Record.model_validate_json((Path(temporary) / RECORD).read_bytes())
        except ValidationError as error:
            raise ValueError(f"{RECORD} was not written by an audit of this version") from error
    return record


def _keys(trusted: Sequence[TrustedKey]) -> dict[str, str | None]:
    return {key.sha256: key.until.isoformat() if key.until is not None else None for key in trusted}


def _state(paths: Iterable[Path]) -> str | None:
    """One digest over the states of files and folders, and of all below them; links are not followed.

    None where one cannot be looked at, or has just changed: a second change in the same tick of the file system's clock
    would not show.
    """
    digest, newest = hashlib.sha256(), 0
    pending = [(os.fspath(path), path.name) for path in paths]
    try:
        while pending:
            path, name = pending.pop()
            s = os.lstat(path)
            facts = (name, stat.S_IFMT(s.st_mode), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino)
            digest.update(repr(facts).encode(errors="surrogateescape"))
            newest = max(newest, s.st_ctime_ns)
            if stat.S_ISDIR(s.st_mode):
                pending += [(f"{path}/{below}", f"{name}/{below}") for below in sorted(os.listdir(path))]
    except OSError:
        return None
    return digest.hexdigest() if time.time_ns() - newest > SETTLED_S * 1e9 else None
