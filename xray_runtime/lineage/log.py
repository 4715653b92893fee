"""The signed log of an output directory: what was published, decided and left there, in order.

    log.jsonl   one entry a line: an in-toto statement in a DSSE envelope, signed with the directory's key

Each entry names the digest of the line before it, so no entry can be removed, inserted or changed; and it lists files
by sha256: the last entry about a file counts. An audit finds files without an entry and entries without a file.

    log.end     the digest of the last line, in a DSSE envelope, replaced at each entry

A log that was cut short is found by comparing it with its `log.end`, and with heads that were kept: by MLflow, by
`--since-verified`, or by a person (`xray audit --expect`).
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from xray_runtime.files import write_atomic
from xray_runtime.lineage.log_entries import (
    EMPTY,
    MOVES,
    CanaryBegan,
    CanaryEnded,
    Decision,
    Entry,
    FilesSigned,
    Head,
    Left,
    Line,
    NightWritten,
    Published,
    Record,
    Recorded,
    RunBegan,
    RunEnded,
    Withdrawn,
)
from xray_runtime.lineage.signed_lines import append_signed_line, read_signed_lines
from xray_runtime.lineage.signing import envelope
from xray_runtime.store.checkpoints import CHECKPOINTS, read_bounded
from xray_runtime.store.identity import file_sha256
from xray_runtime.store.manifest import MANIFEST

LOG, END = "log.jsonl", "log.end"
END_TYPE = "application/vnd.xray.log-end+json"
LOCKS = "locks"
LIFECYCLE, REPORT = "lifecycle.json", "report.html"
"""Written by each run: for programs, and for people."""


@dataclass(frozen=True)
class Canary:
    """A candidate that answers a share of the requests, or did."""

    id: str
    """Digest of the line of its beginning."""
    began: CanaryBegan
    ended: CanaryEnded | None = None


@dataclass
class ChainState:
    """The lines of a signed file so far."""

    heads: list[str] = field(default_factory=list)
    """Digest of each line."""

    @property
    def head(self) -> Head:
        return Head(len(self.heads), self.heads[-1]) if self.heads else EMPTY

    def lacks(self, head: Head) -> str | None:
        """Why a file that once ended in `head` cannot have become this one; None where it can."""
        if head.entries == 0 or (0 < head.entries <= len(self.heads) and self.heads[head.entries - 1] == head.sha256):
            return None
        if head.entries > len(self.heads):
            return f"it has {len(self.heads)} entries and had {head.entries}"
        return f"its entry {head.entries} is not the one it was"


@dataclass
class LogView(ChainState):
    """The state that the entries of a log describe; later entries replace earlier ones."""

    published: dict[str, Published] = field(default_factory=dict)
    """Checkpoints that must be in the store, by directory."""
    files: dict[str, str] = field(default_factory=dict)
    """Path below the output directory → sha256 it must have."""
    runs: dict[str, RunBegan] = field(default_factory=dict)
    """By id, in the order in which they started or resumed."""
    ended: dict[str, RunEnded] = field(default_factory=dict)
    """Runs that ended and were not resumed."""
    decisions: list[Decision] = field(default_factory=list)
    pruned: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)
    """Every checkpoint that was ever published or brought here."""
    recorded: Head = EMPTY
    """The chain of recorded answers must still have this line."""
    withdrawals: list[Withdrawn] = field(default_factory=list)
    nights: dict[int, NightWritten] = field(default_factory=dict)
    """Number → the record of a night."""
    signed: dict[str, FilesSigned] = field(default_factory=dict)
    """Directory below the output directory → the last state of its signed files that the log knows."""
    canaries: dict[str, Canary] = field(default_factory=dict)
    """By id, in order."""
    erased: set[str] = field(default_factory=set)
    """Paths below the output directory of files that a withdrawal erased, and nothing wrote since."""

    @property
    def identity(self) -> str:
        """Equal for copies of one log, different for different logs."""
        return self.heads[0][:16] if self.heads else ""

    @property
    def mark(self) -> str:
        """Identity and head, for MLflow to keep: an audit then notices a log that was cut short."""
        return f"{self.identity}:{self.head}" if self.heads else ""

    @property
    def decided(self) -> dict[tuple[str, str], Decision]:
        """(registered model, alias) → the last decision about it. An alias that points elsewhere was moved by hand:
        MLflow lets anybody do that without a trace."""
        return {(found.name, found.alias): found for found in self.decisions if found.action in MOVES}

    @property
    def decisions_by_version(self) -> dict[tuple[str, str], list[Decision]]:
        """(registered model, version) → the decisions about it, in order."""
        found = defaultdict[tuple[str, str], list[Decision]](list)
        for decision in self.decisions:
            found[decision.name, decision.version].append(decision)
        return found

    def contradicts(self, mark: str) -> str | None:
        """As `lacks`, for a `mark`; the mark of another log says nothing about this one."""
        identity, _, text = mark.partition(":")
        try:
            return self.lacks(Head.parse(text)) if identity == self.identity else None
        except ValueError:
            return "it is no mark of a log"

    def open_runs(self, output: Path) -> set[str]:
        """Runs at work, and those that were cut short and not followed by another in their place."""
        last = {run.place: run_id for run_id, run in self.runs.items()}
        found = {run_id for run_id in last.values() if run_id not in self.ended}
        return found | {run_id for run_id in self.runs.keys() - self.ended.keys() if is_at_work(output, run_id)}

    def add(self, line: Line) -> None:
        entry = line.entry
        self.heads.append(line.sha256)
        if isinstance(entry, Decision):
            self.decisions.append(entry)
            if entry.action == "prune":
                self.pruned.add(entry.checkpoint)
                self.published = {k: v for k, v in self.published.items() if v.checkpoint != entry.checkpoint}
            return
        self.files |= line.files
        self.erased -= line.files.keys()
        if isinstance(entry, Published):
            self.published[entry.directory] = entry
            self.known.add(entry.checkpoint)
            self.pruned.discard(entry.checkpoint)
        elif isinstance(entry, RunBegan):
            self.ended.pop(entry.run_id, None)
            self.runs.pop(entry.run_id, None)
            self.runs[entry.run_id] = entry
        elif isinstance(entry, RunEnded):
            self.ended[entry.run_id] = entry
        elif isinstance(entry, Recorded):
            self.recorded = Head(entry.entries, entry.head)
        elif isinstance(entry, NightWritten):
            self.nights[entry.number] = entry
        elif isinstance(entry, FilesSigned):
            # Two processes may log two changes in the other order.
            known = self.signed.get(entry.directory)
            if known is None or known.changes < entry.changes:
                self.signed[entry.directory] = entry
        elif isinstance(entry, CanaryBegan):
            self.canaries[line.sha256] = Canary(line.sha256, entry)
        elif isinstance(entry, CanaryEnded) and entry.canary in self.canaries:
            # The first decision counts.
            canary = self.canaries[entry.canary]
            self.canaries[entry.canary] = Canary(canary.id, canary.began, canary.ended or entry)
        elif isinstance(entry, Withdrawn):
            self.withdrawals.append(entry)
            self.erased |= set(entry.erased)
            self.files = {name: sha for name, sha in self.files.items() if name not in self.erased}


def is_at_work(output: Path, run_id: str) -> bool:
    try:
        if (output / LOCKS / f"run-{run_id}.lock").is_file():
            run_lock(output, run_id).acquire(timeout=0).lock.release()
    except Timeout:
        return True
    except OSError:
        pass
    return False


def read_lines(output: Path) -> Iterator[Line]:
    """The entries of a log, in order, as `read_signed_lines`."""
    return read_signed_lines(output / LOG, Record)


def view(output: Path) -> LogView:
    """The log as far as it can be read; an audit says whether that is all, and whether it is signed."""
    found = LogView()
    with contextlib.suppress(ValueError):
        for line in read_lines(output):
            found.add(line)
    return found


def append(output: Path, private: Path, entry: Entry, files: Mapping[str, str] | None = None) -> None:
    """Sign an entry and write it to the end of the log: after a crash it is there whole or not at all.

    Args:
        files: path below `output` → sha256.
    """
    with lock(output, "log"):
        append_locked(output, private, entry, files)


def lock(output: Path, name: str) -> FileLock:
    """A lock of an output directory; `log` is held while writing to the log."""
    (output / LOCKS).mkdir(parents=True, exist_ok=True)
    return FileLock(output / LOCKS / f"{name}.lock")


def run_lock(output: Path, run_id: str) -> FileLock:
    """The lock that a run holds while it works in `output`."""
    return lock(output, f"run-{run_id}")


def append_locked(output: Path, private: Path, entry: Entry, files: Mapping[str, str] | None = None) -> None:
    """As `append`, for a caller that holds the lock."""
    if isinstance(entry, Decision):
        files = {f"{entry.name}/{entry.version}": entry.checkpoint}
    line = append_signed_line(output / LOG, Record, entry, files or {}, private)
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


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file; empty where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(read_bounded(path))
        return content if isinstance(content, dict) else {}
    return {}


def read_run(place: Path) -> dict[str, Any]:
    """The content of the lifecycle.json in `place`, as `read_object`."""
    return read_object(place / LIFECYCLE)


def digests(output: Path, paths: list[Path]) -> dict[str, str]:
    """Path below `output` → sha256 of every file in `paths`, and below those that are directories."""
    found = [p for path in paths for p in (sorted(path.rglob("*")) if path.is_dir() else [path]) if p.is_file()]
    return {path.relative_to(output).as_posix(): file_sha256(path) for path in found}
