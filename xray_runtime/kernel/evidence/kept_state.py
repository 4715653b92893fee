"""The state of a long log, kept beside it, so that a process need not read the lines that lead to it.

    log.state    a signed statement about a head of the log and, behind it, the state that its lines describe (SQLite)

A process that has checked the signature of every line keeps it. Another one that trusts the same keys begins with it,
and reads the lines after it. Both must fold entries by the same code. As within a process, the digest of the last line
stands for all lines before it: an edit of an earlier line leaves the state that was checked, and an audit, which reads
every line and never this file, finds the edit. An older state in its place only makes a process read more. Nobody can
write one without the directory's private key. Where Python's SQLite cannot `serialize`, which builds of it leave out,
none is kept or read.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from xray_runtime.kernel.evidence import view as views
from xray_runtime.kernel.evidence.envelope import (
    EvidenceModel,
    InTotoRecord,
    Verifier,
    read_envelope,
    read_record,
    sign,
)
from xray_runtime.kernel.evidence.layered import Layered, Rows
from xray_runtime.kernel.evidence.lines import MAX_BYTES, LogRecord, entry_kinds, parse_line
from xray_runtime.kernel.evidence.view import Decision, Head, Line, LogView, Published, RunBegan, RunEnded, SignedEntry
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.store.manifest import Sha256

STATE = "log.state"
IS_KEPT = hasattr(sqlite3.Connection, "serialize")
DIGEST = 64
"""Hexadecimal digits of a sha256."""


class KeptState(EvidenceModel):
    """Which part of which log a kept state covers; the statement's subject is the state itself."""

    code: Sha256
    """The digest of the code that folded the entries."""
    keys: dict[Sha256, str | None]
    """Every key that was trusted, and until when."""
    head: str
    """The log's (`view.Head`)."""
    offset: int
    """Bytes of the log up to there."""
    last_bytes: int
    """Its last line's."""
    signer: str
    """The key that signed it."""
    retired: list[str]
    """Keys that sign no later line."""


class KeptStateRecord(InTotoRecord[KeptState]):
    predicate_type: Literal["urn:xray:log-state:v1"] = Field(default="urn:xray:log-state:v1", alias="predicateType")


@dataclass(frozen=True)
class KeptLine:
    """A line that is folded again, since its part of the state has no form that could be kept."""

    number: int
    num_decisions: int
    """Decisions before it."""
    text: str


Again = tuple[KeptLine, ...] | None
"""The lines to fold again; None where there is an entry for which that would not do."""


@dataclass(frozen=True)
class FoldedLines:
    """The lines of a log up to some point: their state, and what the next one is checked against."""

    view: LogView = field(default_factory=LogView)
    offset: int = 0
    last_bytes: int = 0
    signer: str = ""
    retired: frozenset[str] = frozenset()
    again: Again = ()
    num_kept: int = 0
    """Lines that a kept state covers."""


def with_line(again: Again, line: Line, view: LogView, text: bytes) -> Again:
    """`FoldedLines.again` with the next line, which `view` has."""
    if again is None or line.entry.folds_into is None:
        return None
    if line.entry.folds_into == "fields":
        return again
    return (*again, KeptLine(line.number, len(view.decisions), text.decode()))


def read_state(path: Path, own: Verifier, like: Verifier | None, *, whole: bool = False) -> FoldedLines | None:
    """The state that is kept in the file `path`; None without one that can be used.

    Args:
        own: has the directory's key, which alone signs states: the holder of another that is trusted can append a line,
            which an audit reads, but must not replace what the lines say.
        like: it must have been made by a process that trusted these keys, and the directory's be one of them that
            signs today; None: whatever that trusted.
        whole: everything in it will be read; by default, what is asked for.
    """
    try:
        if not IS_KEPT or not os.path.lexists(path):
            return None
        statement, _, body = read_bounded(path, MAX_BYTES).partition(b"\n")
        envelope = read_envelope(statement)
        own.check(envelope)
        if like is not None:
            # Without a time, the signature of a retired key does not count.
            like.check(envelope)
        record = read_record(envelope, KeptStateRecord)
        kept, sha256 = record.predicate, hashlib.sha256(body).hexdigest()
        if record.files != {path.name: sha256} or kept.code != _code() or (like is not None and kept.keys != like.keys):
            return None
        view, again = _unpacked(body, whole=True) if whole else _parsed(sha256, body)
        head = Head.parse(kept.head)
        if view.head != head:
            return None
        retired = frozenset(kept.retired)
        return FoldedLines(view, kept.offset, kept.last_bytes, kept.signer, retired, tuple(again), head.entries)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, sqlite3.Error):
        return None


def write_state(path: Path, folded: FoldedLines, verifier: Verifier, private: bytes) -> None:
    """Keep the state of a log, whose lines up to there were all checked with `verifier`, in the file `path`."""
    if not IS_KEPT:
        return
    body = _content(folded)
    kept = KeptState(
        code=_code(),
        keys=verifier.keys,
        head=str(folded.view.head),
        offset=folded.offset,
        last_bytes=folded.last_bytes,
        signer=folded.signer,
        retired=sorted(folded.retired),
    )
    statement = sign(KeptStateRecord.of(kept, {path.name: hashlib.sha256(body).hexdigest()}), private)
    write_atomic(path, statement + body)


MAPPINGS: dict[str, type[SignedEntry] | None] = {
    "published": Published,
    "files": None,
    "runs": RunBegan,
    "ended": RunEnded,
    "known": None,
}
"""Fields of a view that are mappings → the kind of their values; None: text."""
REST = "rest"
"""The row with everything else."""


def _content(folded: FoldedLines) -> bytes:
    """A state as a database."""
    view, rows = folded.view, Rows()
    for name, kind in MAPPINGS.items():
        entries = getattr(view, name)
        rows.write(name, entries if kind is None else {key: one.model_dump_json() for key, one in entries.items()})
    rest = {
        "heads": "".join(view.heads),
        "decisions": [entry.model_dump(mode="json") for entry in view.decisions],
        "pruned": sorted(view.pruned),
        "erased": sorted(view.erased),
        "again": [(line.number, line.num_decisions, line.text) for line in folded.again or ()],
    }
    rows.write(REST, {REST: json.dumps(rest)})
    return rows.content()


_NEWEST: dict[str, tuple[LogView, list[KeptLine]]] = {}
"""Digest of the last state that was read → its content, for the next reader: a view never changes."""


def _parsed(sha256: str, body: bytes) -> tuple[LogView, list[KeptLine]]:
    """The content of a state that was checked."""
    if sha256 not in _NEWEST:
        _NEWEST.clear()
        _NEWEST[sha256] = _unpacked(body, whole=False)
    return _NEWEST[sha256]


def _unpacked(body: bytes, *, whole: bool) -> tuple[LogView, list[KeptLine]]:
    rows = Rows(body)
    rest = json.loads(rows.get(REST, REST) or "{}")
    heads, again = rest["heads"], [KeptLine(*line) for line in rest["again"]]
    mappings: dict[str, Any] = {
        name: {key: _reader(kind)(text) for key, text in rows.items(name)}
        if whole
        else Layered(rows, name, _reader(kind))
        for name, kind in MAPPINGS.items()
    }
    view = LogView(
        heads=[heads[at : at + DIGEST] for at in range(0, len(heads), DIGEST)],
        decisions=[Decision.model_construct(**one) for one in rest["decisions"]],
        pruned=set(rest["pruned"]),
        erased=set(rest["erased"]),
        **mappings,
    )
    view.states = _states(view, again)
    return view, again


def _reader(kind: type[SignedEntry] | None) -> Callable[[str], Any]:
    return str if kind is None else kind.model_validate_json


def _states(view: LogView, again: Sequence[KeptLine]) -> dict[type[object], object]:
    """`LogView.states` after these lines, which are the only ones that change it."""
    other = LogView()
    for kept in again:
        line = parse_line(kept.number, kept.text.encode(), LogRecord)
        other.heads += view.heads[len(other.heads) : kept.number]
        other.decisions += view.decisions[len(other.decisions) : kept.num_decisions]
        line.entry.fold(other, line)
    return other.states


@cache
def _code() -> str:
    """A digest of the code that folds entries: another one may describe another state."""
    modules = {__name__, views.__name__, *(kind.__module__ for kind in entry_kinds().values())}
    digest = hashlib.sha256()
    for name in sorted(modules):
        file = sys.modules[name].__file__
        digest.update(f"{name} ".encode() + hashlib.sha256(Path(str(file)).read_bytes()).digest())
    return digest.hexdigest()
