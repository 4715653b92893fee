"""The signed log in an audit: its end, and the checkpoints that it says are there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.envelope import Verifier, read_envelope, read_record
from xray_runtime.kernel.evidence.log import END, LOG
from xray_runtime.kernel.evidence.view import Head, LogView
from xray_runtime.kernel.history.audit_check import ASK, RECOMPUTE, AuditCheck, Audited, Finding, Meaning
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS, read_bounded
from xray_runtime.trust.log import EndRecord

CODES = {
    "log-missing": Meaning(
        "The signed log of what was published, decided and left here is gone.",
        "Restore log.jsonl from a copy. Where nothing but checkpoints is left, import them into a new directory.",
    ),
    "log-broken": Meaning("The signed log is broken: nothing after this entry can be trusted.", ASK),
    "log-shorter": Meaning("Entries were taken off the signed log, or an older one was put in its place.", ASK),
    "checkpoint-unlogged": Meaning(
        "The signed log does not say that this checkpoint was published here.",
        "Ask where it came from. Running the lifecycle that made it again adds it to the log.",
    ),
    "checkpoint-missing": Meaning("A checkpoint that is recorded is not in the store.", RECOMPUTE),
    "checkpoint-new": Meaning(
        "The signed log does not have this checkpoint yet: a run was interrupted, or is in progress.",
        "Run the lifecycle to its end.",
        is_note=True,
    ),
}


def check_end(output: Path, view: LogView, verifier: Verifier | None) -> Iterator[Finding]:
    """A log that can be read to its end against its signed end."""
    if verifier is not None and (reason := _end_problem(output / END, view, verifier)):
        yield Finding(LOG, "log-shorter", reason)


def _end_problem(path: Path, view: LogView, verifier: Verifier) -> str | None:
    """Why the signed end of the log is not the end of this one; None where it is."""
    if not os.path.lexists(path):
        return f"{END}, which is signed with each entry, is missing"
    try:
        envelope = read_envelope(read_bounded(path))
        # Each entry replaces it, so a retired key signs none that counts.
        verifier.check(envelope)
        sha256 = read_record(envelope, EndRecord).files.get(LOG, "")
    except (OSError, ValueError) as error:
        return f"{END}, which is signed with each entry, does not count ({first_line(error)})"
    # A process that was killed between the two leaves the end of the line before.
    return None if sha256 in view.heads[-2:] else f"{END} names {sha256[:12]}, which is not its last entry"


def check_heads(view: LogView, heads: Mapping[str, Head | None]) -> Iterator[Finding]:
    """The log against heads that were kept; `heads`: who kept it → head."""
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


def _check(audited: Audited) -> Iterator[Finding]:
    output, log = audited.store.output, audited.log
    if audited.is_log_sound:
        yield from check_end(output, log, audited.verifier)
    yield from check_heads(log, audited.heads)
    if log.heads:
        yield from check_published(log, audited.nodes, audited.whole, bool(log.open_runs(output)))


CHECK = AuditCheck("the signed log: its entries, its end, and the checkpoints that it names", CODES, _check)
