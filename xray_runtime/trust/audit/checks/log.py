"""The signed log in an audit: its end, and the checkpoints that it says are there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.envelope import Verifier
from xray_runtime.kernel.evidence.kinds.witness import LogWitness
from xray_runtime.kernel.evidence.log import END, LOG, view
from xray_runtime.kernel.evidence.view import Head, LogView
from xray_runtime.kernel.history.audit_check import ASK, RECOMPUTE, AuditCheck, Audited, Finding, Meaning
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS
from xray_runtime.trust.log import origin
from xray_runtime.trust.merkle import MerkleTree
from xray_runtime.trust.note import LogCheckpoint, WitnessKey
from xray_runtime.trust.witness import (
    LogContradicted,
    WitnessProblem,
    is_server,
    open_witness,
    present,
    read_log_checkpoint,
)

CODES = {
    "log-missing": Meaning(
        "The signed log of what was published, decided and left here is gone.",
        "Restore log.jsonl from a copy. Where nothing but checkpoints is left, import them into a new directory.",
    ),
    "log-broken": Meaning("The signed log is broken: nothing after this entry can be trusted.", ASK),
    "log-shorter": Meaning("Entries were taken off the signed log, or an older one was put in its place.", ASK),
    "witness-silent": Meaning(
        "The log's witness cannot say whether it is the whole log.",
        "Ask the witness's owner. `xray witness use` names another one.",
    ),
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
    """A log that can be read to its end against its signed checkpoint."""
    if verifier is not None:
        try:
            _end(output, view, verifier)
        except LogContradicted as problem:
            yield Finding(LOG, "log-shorter", str(problem))


def _end(output: Path, view: LogView, verifier: Verifier) -> LogCheckpoint:
    """The log's checkpoint. Raises LogContradicted: it is not of this log."""
    if not os.path.lexists(output / END):
        raise LogContradicted(f"{END}, which is signed with each entry, is missing")
    try:
        checkpoint = read_log_checkpoint(output)
        # Each entry replaces it, so a retired key signs none that counts.
        checkpoint.require_signer(verifier.present)
    except ValueError as error:
        raise LogContradicted(f"{END}, which is signed with each entry, does not count ({first_line(error)})") from None
    size = checkpoint.size
    # A process that was killed between the two leaves the checkpoint of the line before.
    if size not in (len(view.heads), len(view.heads) - 1):
        raise LogContradicted(f"{END} is of {size} entries, and there are {len(view.heads)}")
    if (checkpoint.origin, checkpoint.root) != (origin(view.heads), _tree(view).root(size)):
        raise LogContradicted(f"{END} is of other entries")
    return checkpoint


def _tree(view: LogView) -> MerkleTree:
    return MerkleTree(map(bytes.fromhex, view.heads))


def check_witness(audited: Audited) -> Iterator[Finding]:
    """The log against what its witness knows of it: the one that the audit was given, or else that the log names."""
    chosen = audited.log.state(LogWitness).chosen
    address = audited.witness or (chosen.address if chosen is not None else "")
    key = audited.witness_key or (chosen.key if chosen is not None else "")
    if audited.verifier is None or not (address or key):
        return
    output = audited.store.output
    # A run may append meanwhile: the log as it is now must continue the one that was audited.
    for _ in range(3):
        now = view(output)
        try:
            if not address:
                raise WitnessProblem("a key was given, and the log names no witness")
            if reason := now.lacks(audited.log.head):
                raise LogContradicted(f"the log was replaced meanwhile: {reason}")
            checkpoint = _end(output, now, audited.verifier)
            line = present(open_witness(address, audited.verifier.present), _tree(now), checkpoint, checkpoint.size)
            if line is not None and (key or is_server(address)):
                _witness_key(key).require(checkpoint, line, is_fresh=True)
            # A file says who it is of only where a person gave it.
            if line is None and (audited.witness_key or not audited.witness):
                raise WitnessProblem("it is a file, which has no key")
            return
        except LogContradicted as problem:
            reason, code = str(problem), "log-shorter"
        except ValueError as problem:
            reason, code = str(problem), "witness-silent"
        if view(output).head == now.head:
            break
    yield Finding(LOG, code, f"{reason} (witness {address})")


def _witness_key(key: str) -> WitnessKey:
    if not key:
        raise WitnessProblem("what a server says counts only with its key, which neither you nor the log gives")
    return WitnessKey.parse(key)


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
        ends = list(check_end(output, log, audited.verifier))
        yield from ends or check_witness(audited)
    yield from check_heads(log, audited.heads)
    if log.heads:
        yield from check_published(log, audited.nodes, audited.whole, bool(log.open_runs(output)))


CHECK = AuditCheck("the signed log: its entries, its end, and the checkpoints that it names", CODES, _check)
