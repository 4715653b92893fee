"""The audit: is every byte, every record and every pointer still what it was when it was made?

No model is loaded. Weights are hashed as they are read, on all cores. Anything an intruder may have written into the
store gives a finding, never an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xray_runtime.kernel.evidence.envelope import TrustedKey, Verifier
from xray_runtime.kernel.evidence.kinds.witness import LogWitness
from xray_runtime.kernel.evidence.view import EMPTY, Head
from xray_runtime.kernel.graph.artifacts import Benchmark, Evaluation
from xray_runtime.kernel.history.audit_check import CHECKS, AuditCheck, Audited, CheckedLines, Finding, read_log
from xray_runtime.kernel.history.graph import CheckpointGraph, Node
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.trust.audit.verified import RECORD, Baseline, last_head, read_baseline, write_record
from xray_runtime.trust.keys import read_rotations, trusted_keys

WORKERS = 8
"""Checkpoints checked at the same time: much of it is waiting."""


@dataclass
class Audit:
    """The result of an audit."""

    checkpoints: int = 0
    files: int = 0
    bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    unchanged: int = 0
    """Checkpoints that were skipped because they have not changed since they were last verified."""
    log: Head = EMPTY
    """The end of the signed log: with a copy of it one can tell later whether the log was cut short."""
    is_witnessed: bool = False
    """Whether a witness was asked about the log."""
    notes: list[str] = field(default_factory=list)
    """Skipped checkpoints, and the reason."""

    def count(self, nodes: list[Node], changed: list[Node]) -> None:
        sizes = [entry.size for node in nodes for entry in node.manifest.files]
        self.checkpoints, self.files, self.bytes = len(nodes), len(sizes), sum(sizes)
        self.unchanged = len(nodes) - len(changed)

    @property
    def is_sound(self) -> bool:
        return not self.broken

    @property
    def broken(self) -> list[str]:
        """Code and subject of each finding that breaks the audit, each once."""
        return sorted({f"{finding.code} ({finding.subject})" for finding in self.findings if finding.is_broken})

    def to_json(self) -> dict[str, Any]:
        return {
            "sound": self.is_sound,
            "checkpoints": self.checkpoints,
            "files": self.files,
            "bytes": self.bytes,
            "unchanged": self.unchanged,
            "log": str(self.log),
            "notes": self.notes,
            "findings": [finding.to_json() for finding in self.findings],
        }


def audit(
    store: LineageStore,
    starts: Iterable[Node] | None = None,
    *,
    public: Path | Sequence[Path] | None = None,
    hashing: bool = True,
    since_verified: bool = False,
    expect: Head | None = None,
    witness: str = "",
    witness_key: str = "",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Audit:
    """Audit checkpoints, their ancestors, their evaluations and benchmarks.

    Args:
        starts: None audits everything in the store, and looks for records of checkpoints that are gone.
        public: the public keys to trust; by default those in the output directory's `keys/`.
        hashing: False compares only the sizes of files.
        since_verified: skip what has not changed since such an audit found everything sound, and record a sound result
            (see `verified`); only with `starts=None` and hashing.
        expect: a head of the log that somebody kept.
        witness, witness_key: see `Audited`.
        on_progress: called with (checkpoints read, checkpoints to read).
    """
    assert not since_verified or (starts is None and hashing)
    graph, result = store.graph, Audit()
    found = result.findings
    trusted = _trusted(store, public, found)
    verifier = Verifier(trusted) if trusted else None
    baseline = read_baseline(store.output, graph, trusted) if since_verified else None
    lines, broken = read_log(store.output, verifier, baseline.checked if baseline else None)
    log = lines.folded.view
    found += broken
    result.log = log.head
    result.is_witnessed = bool(witness or log.state(LogWitness).chosen)
    nodes = _chosen(graph, starts)
    changed = [node for node in nodes if baseline is None or node.sha256 not in baseline.unchanged]
    result.count(nodes, changed)
    audited = Audited(
        store=store,
        log=log,
        is_log_sound=not broken,
        nodes=nodes,
        changed=changed,
        verifier=verifier,
        public_keys=[key.pem for key in trusted],
        heads={"--expect": expect, RECORD: baseline.head if baseline else last_head(store.output, trusted)},
        witness=witness,
        witness_key=witness_key,
        whole=starts is None,
        hashing=hashing,
        since_verified=since_verified,
    )
    found += _findings(audited, on_progress)
    result.findings = sorted(set(found))
    if baseline is not None:
        result.notes = _baseline_notes(store, result, trusted, baseline, lines)
    return result


def _findings(audited: Audited, on_progress: Callable[[int, int], None]) -> Iterator[Finding]:
    checks = [check for check in map(CHECKS.get, CHECKS) if check.applies(audited)]
    with ThreadPoolExecutor(WORKERS) as pool:
        for done, findings in enumerate(pool.map(lambda node: _of_node(audited, node, checks), audited.changed), 1):
            yield from findings
            on_progress(done, len(audited.changed))
    for check in checks:
        yield from check.run(audited) if check.run is not None else ()


def _chosen(graph: CheckpointGraph, starts: Iterable[Node] | None) -> list[Node]:
    """Checkpoints, their ancestors, evaluations and benchmarks, parents first."""
    chosen = list(graph.nodes) if starts is None else [node.sha256 for node in starts]
    if starts is not None:
        chosen += [node.sha256 for sha in list(chosen) for node in graph.judgements_of(sha, Evaluation, Benchmark)]
    return [graph.nodes[sha] for sha in graph.ancestors(chosen) if sha in graph.nodes]


def _of_node(audited: Audited, node: Node, checks: Sequence[AuditCheck]) -> list[Finding]:
    """Findings about one checkpoint's own files."""
    try:
        return [finding for check in checks if check.run_checkpoint for finding in check.run_checkpoint(audited, node)]
    except OSError as error:
        # It changes while it is read, or may not be read.
        return [Finding(node.name, "file-changed", f"it cannot be read ({error.strerror})")]


def _baseline_notes(
    store: LineageStore, result: Audit, trusted: list[TrustedKey], baseline: Baseline, log: CheckedLines
) -> list[str]:
    """Notes on skipped checkpoints; writes a record for the next audit where all is sound."""
    if baseline.reason:
        notes = [f"everything was read: {baseline.reason}"]
    else:
        notes = [
            f"{result.unchanged} of {result.checkpoints} checkpoints are unchanged in size, inode and times since they "
            "were verified; neither they nor their runs in MLflow were read again. "
            f"Everything was last read {baseline.whole}"
        ]
    problem = "something was found"
    if result.is_sound:
        problem = write_record(store.output, store.graph, trusted, baseline, log)
    return [*notes, *([f"nothing is recorded for the next audit: {problem}"] if problem else [])]


def _trusted(store: LineageStore, public: Path | Sequence[Path] | None, found: list[Finding]) -> list[TrustedKey]:
    """The trusted keys; none where one cannot be used."""
    found += [Finding(name, "rotation-broken", reason) for name, reason in read_rotations(store.output)[1]]
    try:
        return trusted_keys(store.output, public)
    except (OSError, ValueError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        found.append(Finding("keys", "key-missing", reason))
        return []
