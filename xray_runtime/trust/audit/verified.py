"""The record of a sound audit, so that the next one may skip what has not changed since.

    verified.json    for each checkpoint its digest, its parents, and the state of every file and folder in it; a signed
                     statement whose subject is the end of the log
    verified.state   the state that the log described then, in the form of `kernel.evidence.kept_state`

A state is type, size, inode and both times (modification, and last change of the inode). A write through the file
system changes the last of them, which cannot be set back. A clock that was set back, a write to the raw disk and
decayed bits are not noticed; so an audit skips checkpoints only on request.

A record counts only if a key that signs today signed it, and if it is about this directory, this version of X-ray and
the keys that are trusted now. An older record put in its place only makes the audit read more. Later audits check that
the log still begins with the same bytes, and then take the state that these bytes described from the second file.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.envelope import (
    EvidenceModel,
    InTotoRecord,
    TrustedKey,
    Verifier,
    read_envelope,
    read_record,
    sign,
)
from xray_runtime.kernel.evidence.kept_state import write_state
from xray_runtime.kernel.evidence.log import LOG, own_state
from xray_runtime.kernel.evidence.view import Head
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.history.audit_check import CheckedLines
from xray_runtime.kernel.history.graph import CheckpointGraph
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.store.digest_memory import shows_changes
from xray_runtime.kernel.store.manifest import Sha256
from xray_runtime.trust.provenance import package_digest
from xray_runtime.trust.signing import has_signing_key, require_agent, signing_key

RECORD, STATE = "verified.json", "verified.state"
MAX_BYTES = 2**30
"""A record has some 400 bytes for each checkpoint."""


class Entry(NamedTuple):
    """One checkpoint that was verified."""

    sha256: Sha256
    state: Sha256
    parents: list[Sha256]


class Verified(EvidenceModel):
    """Everything that was verified."""

    output: str
    package: Sha256
    """Digest of X-ray: another version may check more."""
    keys: dict[Sha256, str | None]
    """Every trusted key, and until when."""
    whole: str
    """When everything was last read."""
    checkpoints: dict[str, Entry]
    """By directory name."""
    log: str
    """The head of the log (`log.Head`)."""
    log_bytes: Sha256
    """sha256 of the log up to there."""


class VerifiedRecord(InTotoRecord[Verified]):
    predicate_type: Literal["urn:xray:verified:v1"] = Field(default="urn:xray:verified:v1", alias="predicateType")


@dataclass
class Baseline:
    """The verified baseline: checkpoints that an audit can skip, and the states for a record of its own."""

    states: dict[str, str | None]
    """State of every checkpoint by its directory's name, before anything was read."""
    reason: str = ""
    """Why nothing is skipped."""
    whole: str = ""
    """When everything was last read; empty if that is now."""
    unchanged: set[str] = field(default_factory=set)
    """Digests of the checkpoints that are skipped."""
    head: Head | None = None
    """The end of the log then."""
    checked: CheckedLines | None = None
    """The lines of the log then, if their state was kept."""


def read_baseline(output: Path, graph: CheckpointGraph, trusted: Sequence[TrustedKey]) -> Baseline:
    """The checkpoints that have not changed since the last record; none, with the reason, if it does not count."""
    # Before anything is read: a checkpoint that changes during the audit has another state the next time.
    states = {node.directory.name: _state(node.directory) for node in graph.nodes.values()}
    baseline = Baseline(states)
    try:
        record = _read(output, trusted)
        baseline.head = Head.parse(record.log)
        if record.output != str(output.resolve()):
            raise ValueError(f"{RECORD} is of {record.output}")
        if record.package != package_digest():
            raise ValueError("another version of X-ray made the last audit")
        if record.keys != _keys(trusted):
            raise ValueError("other keys were trusted at the last audit")
    except (OSError, ValueError, RecursionError) as error:
        baseline.reason = first_line(error)
        return baseline
    baseline.whole = record.whole
    folded = own_state(output / STATE, Verifier(trusted), whole=True)
    if folded is not None and folded.view.head == baseline.head:
        baseline.checked = CheckedLines(folded, record.log_bytes)
    for sha256, node in graph.nodes.items():
        entry = record.checkpoints.get(node.directory.name)
        if entry is not None and (entry.sha256, entry.state) == (sha256, states[node.directory.name]):
            baseline.unchanged.add(sha256)
    # Their model cards may be signed by an evaluation that is gone.
    gone = [entry for entry in record.checkpoints.values() if entry.sha256 not in graph.nodes]
    baseline.unchanged -= {parent for entry in gone for parent in entry.parents}
    return baseline


def last_head(output: Path, trusted: Sequence[TrustedKey]) -> Head | None:
    """The end of the log at the last sound audit; None without a record that counts."""
    try:
        return Head.parse(_read(output, trusted).log)
    except (OSError, ValueError, RecursionError):
        return None


def write_record(
    output: Path, graph: CheckpointGraph, trusted: Sequence[TrustedKey], baseline: Baseline, log: CheckedLines
) -> str:
    """Record that all of this is sound; returns why it was not recorded, or an empty text."""
    head = log.folded.view.head
    if not has_signing_key(output):
        return "the private key that would sign it is not here"
    try:
        private = require_agent(signing_key(output))
    except ConfigError as error:
        return str(error)
    verified = Verified(
        output=str(output.resolve()),
        package=package_digest(),
        keys=_keys(trusted),
        whole=baseline.whole or datetime.now(UTC).isoformat(timespec="seconds"),
        checkpoints={
            node.directory.name: Entry(node.sha256, state, sorted(set(node.manifest.parents.values())))
            for node in graph.nodes.values()
            if (state := baseline.states.get(node.directory.name)) is not None
        },
        log=str(head),
        log_bytes=log.sha256,
    )
    if log.folded.again is not None and (baseline.checked is None or baseline.checked.folded.view.head != head):
        write_state(output / STATE, log.folded, Verifier(trusted), private.read_bytes())
    write_atomic(output / RECORD, sign(VerifiedRecord.of(verified, {LOG: head.sha256}), private.read_bytes()))
    return ""


def _read(output: Path, trusted: Sequence[TrustedKey]) -> Verified:
    """The record. Raises ValueError or OSError where it does not count."""
    if not os.path.lexists(output / RECORD):
        raise ValueError("nothing was verified before")
    envelope = read_envelope(read_bounded(output / RECORD, MAX_BYTES))
    # Without a time, the signature of a retired key does not count.
    Verifier(trusted).check(envelope)
    try:
        return read_record(envelope, VerifiedRecord).predicate
    except ValueError as error:
        raise ValueError(f"{RECORD} was not written by an audit of this version") from error


def _keys(trusted: Sequence[TrustedKey]) -> dict[str, str | None]:
    return {key.sha256: key.until.isoformat() if key.until is not None else None for key in trusted}


def _state(directory: Path) -> str | None:
    """One digest over the states of a directory and all below it; links are not followed.

    None where one cannot be read, or changed lately: `digest_memory` says why.
    """
    digest, newest = hashlib.sha256(), 0
    pending = [(os.fspath(directory), directory.name)]
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
    return digest.hexdigest() if shows_changes(directory, newest) else None
