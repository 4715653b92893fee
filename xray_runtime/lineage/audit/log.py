"""The signed log in an audit: whether it is whole, and what it says must be there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from filelock import Timeout

from xray_runtime.lineage.audit.findings import Finding
from xray_runtime.lineage.decisions import MOVES
from xray_runtime.lineage.graph import Node
from xray_runtime.lineage.log import (
    EMPTY,
    LOCKS,
    LOG,
    Decision,
    Head,
    Line,
    Published,
    RunBegan,
    RunEnded,
    read_lines,
    run_lock,
)
from xray_runtime.lineage.signing import SignatureProblem, Verifier
from xray_runtime.store.checkpoints import CHECKPOINTS


@dataclass
class LogView:
    """What the whole entries of a log say, in the order they were written: a later one counts."""

    heads: list[str] = field(default_factory=list)
    """Digest of each line."""
    published: dict[str, Published] = field(default_factory=dict)
    """Checkpoints that must be in the store, by directory."""
    files: dict[str, str] = field(default_factory=dict)
    """Path below the output directory → sha256 of what it must hold."""
    runs: dict[str, RunBegan] = field(default_factory=dict)
    """By id; the run that began, or went on, last is the last."""
    ended: dict[str, RunEnded] = field(default_factory=dict)
    """Runs that ended and did not go on."""
    decided: dict[tuple[str, str], Decision] = field(default_factory=dict)
    """(registered model, alias) → the last decision about it."""
    pruned: set[str] = field(default_factory=set)

    @property
    def head(self) -> Head:
        return Head(len(self.heads), self.heads[-1]) if self.heads else EMPTY

    @property
    def identity(self) -> str:
        """Which log this is: a copy that goes on elsewhere has the same, another log has not."""
        return self.heads[0][:16] if self.heads else ""

    def lacks(self, head: Head) -> str | None:
        """Why a log that once ended in `head` cannot have become this one; None where it can."""
        if head.entries == 0 or (0 < head.entries <= len(self.heads) and self.heads[head.entries - 1] == head.sha256):
            return None
        if head.entries > len(self.heads):
            return f"it has {len(self.heads)} entries and had {head.entries}"
        return f"its entry {head.entries} is not the one it was"

    def contradicts(self, mark: str) -> str | None:
        """As `lacks`, of what `log.mark` gave; another log's mark says nothing of this one."""
        identity, _, text = mark.partition(":")
        try:
            return self.lacks(Head.parse(text)) if identity == self.identity else None
        except ValueError:
            return "it is no mark of a log"

    def open_runs(self, output: Path) -> set[str]:
        """Runs that are at work, or were cut short with no other begun in their place since."""
        last = {run.place: run_id for run_id, run in self.runs.items()}
        found = {run_id for run_id in last.values() if run_id not in self.ended}
        return found | {run_id for run_id in self.runs.keys() - self.ended.keys() if _is_at_work(output, run_id)}

    def add(self, line: Line) -> None:
        entry = line.entry
        self.heads.append(line.sha256)
        if isinstance(entry, Decision):
            if entry.action in MOVES:
                self.decided[entry.name, entry.alias] = entry
            elif entry.action == "prune":
                self.pruned.add(entry.checkpoint)
                self.published = {k: v for k, v in self.published.items() if v.checkpoint != entry.checkpoint}
            return
        self.files |= line.files
        if isinstance(entry, Published):
            self.published[entry.directory] = entry
            self.pruned.discard(entry.checkpoint)
        elif isinstance(entry, RunBegan):
            self.ended.pop(entry.run_id, None)
            self.runs.pop(entry.run_id, None)
            self.runs[entry.run_id] = entry
        elif isinstance(entry, RunEnded):
            self.ended[entry.run_id] = entry


def read_log(output: Path, verifier: Verifier | None) -> tuple[LogView, list[Finding]]:
    """The log up to the first entry that is not whole, and what is wrong with it."""
    view, found = LogView(), list[Finding]()
    signer, retired = "", set[str]()
    try:
        for line in read_lines(output):
            subject = f"{LOG} {line.number}"
            if line.entry.previous != view.head.sha256:
                found.append(Finding(subject, "log-broken", "it does not follow the one before"))
                break
            if verifier is not None:
                key = verifier.check_envelope(line.text, line.entry.at)
                # Whatever time an entry claims: a key that was taken over from signs none after it.
                if key in retired:
                    found.append(Finding(subject, "log-broken", "it was signed with a key that was retired before it"))
                    break
                retired |= {signer} - {key}
                signer = key
            view.add(line)
    except SignatureProblem as problem:
        found.append(Finding(f"{LOG} {view.head.entries + 1}", "log-broken", str(problem)))
    except ValueError as error:
        found.append(Finding(LOG, "log-broken", str(error)))
    if not os.path.lexists(output / LOG):
        found.append(Finding(LOG, "log-missing", f"there is no {LOG} in {output.name}"))
    return view, found


def check_heads(view: LogView, heads: Mapping[str, Head | None]) -> Iterator[Finding]:
    """Who says so → where the log ended once."""
    for who, head in heads.items():
        reason = view.lacks(head) if head is not None else None
        if reason is not None:
            yield Finding(LOG, "log-shorter", f"{reason} ({who})")


def check_published(view: LogView, nodes: Iterable[Node], everything: bool, is_open: bool) -> Iterator[Finding]:
    """The log against the checkpoints of the store.

    Args:
        is_open: whether a run may have been cut short between a checkpoint and its entry.
    """
    there = {node.directory.name: node for node in nodes}
    for name, node in there.items():
        entry = view.published.get(name)
        if entry is None or entry.checkpoint != node.sha256:
            detail = f"{CHECKPOINTS}/{name} is in no entry of {LOG}"
            yield Finding(node.name, "checkpoint-new" if is_open else "checkpoint-unlogged", detail)
    if everything:
        for name, entry in view.published.items():
            if name not in there:
                yield Finding(name, "checkpoint-missing", f"{LOG} says {entry.checkpoint[:12]} was published")


def _is_at_work(output: Path, run_id: str) -> bool:
    if not (output / LOCKS / f"run-{run_id}.lock").is_file():
        return False
    try:
        run_lock(output, run_id).acquire(timeout=0).lock.release()
    except Timeout:
        return True
    except OSError:
        pass
    return False
