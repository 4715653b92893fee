"""The chain of decisions about registered models: one signed file each, naming the digest of the one before.

MLflow lets anybody move an alias without a trace. Here every registration, promotion and roll-back is a signed in-toto
statement in `decisions/NNNNNN.json`; an alias that does not point where the last decision put it was moved by hand.

    decisions/NNNNNN.json, .sig   a decision and its signature, which is there first: a decision is signed or not there
    decisions/.writing/           both, until they have their names
    decisions/.index.sqlite       how far the chain has been read, so that a decision does not read all before it

Only `decide` uses the index, and believes nothing in it: where the chain ends, and whether a registration repeats the
last one, is checked in the files. Wrong, damaged or missing, it costs reading the chain.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xray_runtime.files import sync
from xray_runtime.lineage.audit.findings import Finding
from xray_runtime.lineage.signing import SignatureProblem, Verifier, sign
from xray_runtime.lineage.statement import InTotoRecord, Subject
from xray_runtime.store.checkpoints import read_bounded
from xray_runtime.store.identity import file_sha256
from xray_runtime.store.manifest import Sha256

FOLDER = "decisions"
WRITING, LOCK, INDEX = ".writing", ".lock", ".index.sqlite"
START = "0" * 64

Action = Literal["register", "promote", "decline", "rollback", "prune", "rotate"]
MOVES = ("register", "promote", "rollback")
"""Actions after which an alias points somewhere else."""


class Decision(BaseModel):
    """One decision: `alias` of the registered model `name` now points to `version`, which is `checkpoint`.

    With `decline` it does not: a person said no. Two are about no model: with `prune`, `checkpoint` was removed from
    the store, and that was meant; with `rotate` it is the sha256 of the public key that signs from here on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    action: Action
    name: str
    alias: str
    version: str
    checkpoint: Sha256
    previous: Sha256
    """sha256 of the decision before; zeros for the first."""
    by: str
    at: str
    note: str = ""
    gates: list[dict[str, Any]] = Field(default_factory=list)
    """What was checked, with the numbers."""
    gates_from: str = ""
    """Where the bounds of the gates come from."""
    page: int = 0
    """Of a registration: which form of `model_page` MLflow shows; 0: none."""
    evidence: dict[str, Sha256] = Field(default_factory=dict)
    """`evaluation`, `comparison` → the checkpoints the numbers were read from; `statement` → the policy's own."""


class _Record(InTotoRecord[Decision]):
    predicate_type: Literal["urn:xray:decision:v1"] = Field("urn:xray:decision:v1", alias="predicateType")


def decide(
    output: Path,
    private_key: Path,
    *,
    action: Action,
    name: str = "",
    alias: str = "",
    version: str = "",
    checkpoint: str,
    note: str = "",
    by: str | None = None,
    gates: list[dict[str, Any]] | None = None,
    gates_from: str = "",
    evidence: dict[str, str] | None = None,
    page: int = 0,
) -> None:
    """Append a decision. The same registration twice in a row is one.

    Raises:
        ValueError: a decision is missing in the chain.
    """
    folder = output / FOLDER
    folder.mkdir(exist_ok=True)
    with FileLock(folder / LOCK):
        number, previous, last = _end(folder, name, alias)
        decision = Decision(
            action=action,
            name=name,
            alias=alias,
            version=version,
            checkpoint=checkpoint,
            previous=previous,
            by=by or getpass.getuser(),
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            note=note,
            gates=gates or [],
            gates_from=gates_from,
            evidence=evidence or {},
            page=page,
        )
        if action == "register" and _repeats(folder, last, number, decision):
            return
        subject = Subject.model_validate({"name": f"{name}/{version}", "digest": {"sha256": checkpoint}})
        record = _Record.model_validate({"subject": [subject], "predicate": decision})
        _append(folder, number + 1, record, private_key)


def _append(folder: Path, number: int, record: _Record, private_key: Path) -> None:
    """Write a decision with its signature; killed at any moment, it is there with its signature or not at all."""
    writing = folder / WRITING
    # Of one that was killed: the lock says that nobody is writing.
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir()
    path = writing / _file(number)
    path.write_text(record.to_text(), encoding="utf-8")
    signature = path.with_suffix(".sig")
    sign(path, signature, private_key)
    sync(path)
    sync(signature)
    os.replace(signature, folder / signature.name)
    sync(folder)
    # Unlike a rename, a link never replaces a decision that is there.
    os.link(path, folder / path.name)
    sync(folder)
    shutil.rmtree(writing)


def _end(folder: Path, name: str, alias: str) -> tuple[int, str, int]:
    """(number and digest of the last decision, number of the last that moved this alias as the index has it)."""
    try:
        return _read_on(folder, name, alias)
    except sqlite3.DatabaseError:
        (folder / INDEX).unlink(missing_ok=True)
        return _read_on(folder, name, alias)


def _read_on(folder: Path, name: str, alias: str) -> tuple[int, str, int]:
    """As `_end`: goes on from where the index ends, if the decision there is the one it was, and brings it to the end.

    Raises sqlite3.DatabaseError where the index is damaged.
    """
    if (folder / INDEX).is_symlink():
        (folder / INDEX).unlink()
    with contextlib.closing(sqlite3.connect(folder / INDEX)) as index, index:
        # It can be made anew at any time.
        index.execute("PRAGMA synchronous = OFF")
        index.execute("CREATE TABLE IF NOT EXISTS read (number INTEGER PRIMARY KEY, sha256 TEXT NOT NULL)")
        index.execute("CREATE TABLE IF NOT EXISTS moves (name TEXT, alias TEXT, number INTEGER, UNIQUE (name, alias))")
        read = index.execute("SELECT number, sha256 FROM read ORDER BY number DESC LIMIT 1").fetchone()
        number, sha256 = read or (0, START)
        if read is not None and _digest(folder, number) != sha256:
            index.execute("DELETE FROM moves")
            number, sha256 = 0, START
        start = number
        while (digest := _digest(folder, number + 1)) is not None:
            number, sha256 = number + 1, digest
            with contextlib.suppress(OSError, ValueError):
                decision = _read(folder / _file(number))
                if decision.action in MOVES:
                    row = (decision.name, decision.alias, number)
                    index.execute("INSERT OR REPLACE INTO moves VALUES (?, ?, ?)", row)
        if number != start or read is None:
            index.execute("DELETE FROM read")
            index.execute("INSERT INTO read VALUES (?, ?)", (number, sha256))
        # A chain that was read from its start is seen whole, also beyond a gap.
        if start == 0 and len(_files(folder.parent)) != number:
            raise ValueError(f"{folder / _file(number + 1)} is missing: no decision can be added; see `xray audit`")
        moved = index.execute("SELECT number FROM moves WHERE name = ? AND alias = ?", (name, alias)).fetchone()
    return number, sha256, moved[0] if moved and isinstance(moved[0], int) else 0


def _repeats(folder: Path, last: int, end: int, new: Decision) -> bool:
    """Whether decision `last` is the registration `new`, and no decision after it up to `end` moved that alias."""

    def move(at: int) -> Decision | None:
        with contextlib.suppress(OSError, ValueError):
            decision = _read(folder / _file(at))
            if decision.action in MOVES and (decision.name, decision.alias) == (new.name, new.alias):
                return decision
        return None

    def facts(decision: Decision) -> tuple[Any, ...]:
        return decision.version, decision.checkpoint, decision.evidence, decision.page

    before = move(last) if last > 0 else None
    if before is None or facts(before) != facts(new):
        return False
    return all(move(later) is None for later in range(last + 1, end + 1))


def _digest(folder: Path, number: int) -> str | None:
    """sha256 of a decision; None where there is none."""
    path = folder / _file(number)
    return None if number < 1 or path.is_symlink() or not path.is_file() else file_sha256(path)


def _file(number: int) -> str:
    return f"{number:06}.json"


def current(output: Path) -> dict[tuple[str, str], Decision]:
    """(registered model, alias) → the last decision about it."""
    return {(d.name, d.alias): d for d in _readable(output) if d.action in MOVES}


def decisions_by_version(output: Path) -> dict[tuple[str, str], list[Decision]]:
    """(registered model, version) → the decisions about it, in order."""
    found = defaultdict[tuple[str, str], list[Decision]](list)
    for decision in _readable(output):
        found[decision.name, decision.version].append(decision)
    return found


def pruned(output: Path) -> set[str]:
    """Checkpoints whose removal was decided."""
    return {decision.checkpoint for decision in _readable(output) if decision.action == "prune"}


def _readable(output: Path) -> Iterator[Decision]:
    """All decisions in order; those that cannot be read are passed over."""
    for path in _files(output):
        with contextlib.suppress(OSError, ValueError):
            yield _read(path)


class ChainEnd(BaseModel):
    """How far a chain was checked, and what the next decision is checked against."""

    model_config = ConfigDict(extra="forbid")

    count: int = 0
    last: Sha256 = START
    """Digest of the last decision."""
    signer: str = ""
    """Digest of the key that signed it."""
    retired: set[str] = Field(default_factory=set)
    """Keys that another took over from."""


def check_chain(output: Path, verifier: Verifier | None, end: ChainEnd | None = None) -> Iterator[Finding]:
    """Whether every decision is signed, none is missing, and none was changed.

    Args:
        end: those up to here are taken as checked; it is moved on.
    """
    end = end or ChainEnd()
    for number, path in enumerate(_files(output)[end.count :], start=end.count + 1):
        subject = f"{FOLDER}/{path.name}"
        if path.name != _file(number):
            yield Finding(subject, "decision-broken", f"decision {number:06} is missing")
            return
        try:
            decision = _read(path)
        except (OSError, ValueError) as error:
            yield Finding(subject, "decision-broken", f"it cannot be read ({type(error).__name__})")
            return
        if verifier is not None:
            try:
                key = verifier.check(path, path.with_suffix(".sig"), decision.at)
            except SignatureProblem as problem:
                yield Finding(subject, "decision-broken", str(problem))
            else:
                # Whatever time a decision claims: a key that was taken over from signs none after it.
                if key in end.retired:
                    yield Finding(subject, "decision-broken", "it was signed with a key that was retired before it")
                end.retired |= {end.signer} - {key}
                end.signer = key
        if decision.previous != end.last:
            yield Finding(subject, "decision-broken", "it does not follow the one before")
        end.count, end.last = number, file_sha256(path)


def count_decisions(output: Path) -> int:
    """How many there are."""
    return len(_files(output))


def _files(output: Path) -> list[Path]:
    folder = output / FOLDER
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(path for path in folder.glob("*.json") if not path.is_symlink())


def _read(path: Path) -> Decision:
    try:
        return _Record.model_validate_json(read_bounded(path)).predicate
    except (ValidationError, RecursionError) as error:
        raise ValueError(f"{path}: not a decision") from error
