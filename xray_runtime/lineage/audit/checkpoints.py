"""The audit: is every byte, every record and every pointer still what it was when it was made?

No model is loaded. Weights are hashed as they are read, on all cores. Anything an intruder may have written into the
store gives a finding, never an exception.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xray_runtime.evidence.statement import Statement
from xray_runtime.evidence.view import EMPTY, Head, LogView
from xray_runtime.graph.artifacts import Benchmark, Evaluation
from xray_runtime.lineage.attestation import DIFF, EVALUATED_CARD, RECORD_FILES, foreign_in_record
from xray_runtime.lineage.audit.contamination import Prompts, Spans, check_dataset, check_evaluation
from xray_runtime.lineage.audit.files import check_files, check_kept, check_record
from xray_runtime.lineage.audit.findings import Finding
from xray_runtime.lineage.audit.log import check_end, check_heads, check_published, read_log
from xray_runtime.lineage.audit.recorded import check_comparisons, check_recorded
from xray_runtime.lineage.audit.sources import check_commits, check_sources
from xray_runtime.lineage.audit.verified import RECORD, Baseline, last_head, read_baseline, write_record
from xray_runtime.lineage.card import CHECKPOINT_LINE
from xray_runtime.lineage.graph import Node
from xray_runtime.lineage.keys import read_rotations, trusted_keys
from xray_runtime.lineage.reference import LineageStore
from xray_runtime.lineage.signing import SignatureProblem, TrustedKey, Verifier, exposed_keys
from xray_runtime.store.checkpoints import CHECKPOINTS, MAX_RECORD_BYTES, inspect, read_bounded
from xray_runtime.store.identity import file_sha256
from xray_runtime.store.manifest import ATTESTATION, CARD, SIGNATURE, STATEMENT

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
        on_progress: called with (checkpoints read, checkpoints to read).
    """
    assert not since_verified or (starts is None and hashing)
    graph, result, everything = store.graph, Audit(), starts is None
    chosen = list(graph.nodes) if starts is None else [node.sha256 for node in starts]
    if not everything:
        chosen += [node.sha256 for sha in list(chosen) for node in graph.judgements_of(sha, Evaluation, Benchmark)]
    order, found = graph.ancestors(chosen), result.findings
    found += _structure(store, order, everything)
    trusted = _trusted(store, public, found)
    verifier = Verifier(trusted) if trusted else None
    baseline = read_baseline(store.output, graph, trusted) if since_verified else None
    view, broken = read_log(store.output, verifier)
    found += broken or check_end(store.output, view, verifier)
    result.log = view.head
    heads = {"--expect": expect, RECORD: baseline.head if baseline is not None else last_head(store.output, trusted)}
    found += check_heads(view, heads)
    nodes = [graph.nodes[sha] for sha in order if sha in graph.nodes]
    changed = [node for node in nodes if baseline is None or node.sha256 not in baseline.unchanged]
    result.count(nodes, changed)
    with ThreadPoolExecutor(WORKERS) as pool:
        for done, findings in enumerate(pool.map(lambda node: _node(store, node, verifier, hashing, view), changed), 1):
            found += findings
            on_progress(done, len(changed))
    if hashing:
        found += _contamination(store, [node for node in changed if not _erased(node, view, "prompts.json")])
    found += check_commits(
        {node.statement.predicate.build.internal.code.git_commit for node in changed if node.statement}
    )
    if view.heads:
        found += check_published(view, nodes, everything, bool(view.open_runs(store.output)))
    if everything:
        found += _whole_output(store, view, trusted, verifier, hashing, hashing and baseline is None)
    from xray_runtime.lineage.audit.tracking import check_tracking

    found += check_tracking(store, view, nodes, everything, changed)
    result.findings = sorted(set(found))
    if baseline is not None:
        result.notes = _baseline_notes(store, result, trusted, baseline)
    return result


def _whole_output(
    store: LineageStore,
    view: LogView,
    trusted: list[TrustedKey],
    verifier: Verifier | None,
    hashing: bool,
    reads_kept: bool,
) -> Iterator[Finding]:
    """Findings about an output directory beside its checkpoints."""
    yield from (Finding("keys", "key-exposed", text) for text in exposed_keys(store.output))
    yield from check_record(store, view)
    yield from check_files(store, view)
    yield from check_kept(store.output, trusted, reads_kept)
    yield from check_recorded(store, view, verifier, hashing)
    yield from check_comparisons(store.output, view, verifier)


def _contamination(store: LineageStore, nodes: list[Node]) -> Iterator[Finding]:
    prompts = Prompts(store.graph)
    spans = Spans(store.graph, [node for node in nodes if node.sides])
    for node in nodes:
        yield from check_dataset(node, prompts)
        yield from check_evaluation(node, store.graph, prompts, spans)


def _baseline_notes(store: LineageStore, result: Audit, trusted: list[TrustedKey], baseline: Baseline) -> list[str]:
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
        problem = write_record(store.output, store.graph, trusted, baseline, result.log)
    return [*notes, *([f"nothing is recorded for the next audit: {problem}"] if problem else [])]


def _erased(node: Node, view: LogView, path: str) -> bool:
    """Whether a withdrawal erased this file of a checkpoint."""
    return f"{CHECKPOINTS}/{node.directory.name}/{path}" in view.erased


def _node(store: LineageStore, node: Node, verifier: Verifier | None, hashing: bool, view: LogView) -> list[Finding]:
    """Findings about one checkpoint's own files."""
    try:
        return _of_node(store, node, verifier, hashing, view)
    except OSError as error:
        # It changes while it is read, or may not be read.
        return [Finding(node.name, "file-changed", f"it cannot be read ({error.strerror})")]


def _of_node(store: LineageStore, node: Node, verifier: Verifier | None, hashing: bool, view: LogView) -> list[Finding]:
    found = []
    for damage in inspect(node.directory, node.sha256, file_sha256 if hashing else None):
        is_erased = damage.code == "file-missing" and _erased(node, view, damage.path)
        found.append(Finding(node.name, "withdrawn" if is_erased else damage.code, damage.text))
    found += _identity(node)
    attested = list(_attestation(store, node, verifier))
    found += attested
    if hashing and verifier is not None and not any(finding.is_broken for finding in attested):
        found += check_sources(node)
    return found


def _structure(store: LineageStore, order: list[str], everything: bool) -> Iterator[Finding]:
    graph = store.graph
    position = {sha: i for i, sha in enumerate(order)}
    for sha in order:
        node = graph.nodes.get(sha)
        if node is None:
            continue
        if not node.is_at_home:
            yield Finding(node.name, "misplaced", f"it is in {node.directory.name}")
        for role, parent in graph.parents(sha):
            if parent not in graph.nodes:
                yield Finding(node.name, "parent-missing", f"{role} {parent[:12]} is not in the store")
            elif position[parent] >= position[sha]:
                yield Finding(node.name, "cycle", f"its {role} {parent[:12]} comes from it")
    for copy in graph.duplicates:
        if everything or copy.sha256 in position:
            yield Finding(copy.name, "duplicate", f"there is another copy in {copy.directory.name}")
    if everything:
        for directory, reason in graph.unreadable.items():
            yield Finding(directory.name, "manifest-malformed", reason)


def _trusted(store: LineageStore, public: Path | Sequence[Path] | None, found: list[Finding]) -> list[TrustedKey]:
    """The trusted keys; none where one cannot be used."""
    found += [Finding(name, "rotation-broken", reason) for name, reason in read_rotations(store.output)[1]]
    try:
        trusted = trusted_keys(store.output, public)
        Verifier(trusted)
    except (OSError, ValueError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        found.append(Finding("keys", "key-missing", reason))
        return []
    return trusted


def _identity(node: Node) -> Iterator[Finding]:
    manifest, kind = node.manifest, node.kind
    try:
        key = manifest.identity.key
    except (ValueError, RecursionError):
        # X-ray writes no such JSON: NaN, half a character.
        key = None
    if key != manifest.key:
        yield Finding(node.name, "manifest-inconsistent", "its key does not follow from its content")
    if kind is not None and kind.output.__name__ != manifest.type:
        yield Finding(
            node.name, "manifest-inconsistent", f"a stage of kind {kind.name} does not make a {manifest.type}"
        )
    if manifest.dataset not in (None, *manifest.parents.values()):
        yield Finding(node.name, "manifest-inconsistent", "its dataset is not one of its parents")


def _attestation(store: LineageStore, node: Node, verifier: Verifier | None) -> Iterator[Finding]:
    directory, record = node.directory, node.directory / ATTESTATION
    if record.is_symlink() or not record.is_dir():
        yield Finding(node.name, "statement-missing", f"there is no {ATTESTATION}/")
        return
    if (foreign := foreign_in_record(record)) is not None:
        name, reason = foreign
        code = "statement-malformed" if name in RECORD_FILES and "large" in reason else "file-added"
        yield Finding(node.name, code, f"{ATTESTATION}/{name} {reason}")
        return
    if verifier is not None:
        try:
            verifier.check(record, directory / SIGNATURE, node.finished or None)
        except SignatureProblem as problem:
            yield Finding(node.name, f"signature-{problem.code}", str(problem))
    statement = node.statement
    if statement is None:
        missing = not (record / STATEMENT).exists()
        code = "statement-missing" if missing else "statement-malformed"
        yield Finding(node.name, code, f"{ATTESTATION}/{STATEMENT} {'is missing' if missing else 'is not a statement'}")
        return
    differing = statement.contradicts(node.manifest, node.sha256)
    if differing:
        yield Finding(node.name, "statement-contradicts", f"they differ in: {', '.join(differing)}")
    yield from _code(node, statement)
    yield from _card(store, node, statement)


def _code(node: Node, statement: Statement) -> Iterator[Finding]:
    recorded = statement.predicate.build.internal.code.diff_sha256
    diff = node.directory / ATTESTATION / DIFF
    actual = file_sha256(diff, RECORD_FILES[DIFF]) if diff.is_file() else None
    if actual != recorded:
        yield Finding(node.name, "statement-contradicts", f"{ATTESTATION}/{DIFF} is not the one recorded")
    if recorded is not None:
        yield Finding("code", "code-uncommitted", f"changes {recorded[:12]}")


def _card(store: LineageStore, node: Node, statement: Statement) -> Iterator[Finding]:
    path = node.directory / CARD
    allowed = {subject.digest.sha256 for subject in statement.subject if subject.name == CARD}
    # lexists: a dangling link counts as a card.
    if not allowed and not os.path.lexists(path):
        return
    for _, child in store.graph.children.get(node.sha256, []):
        card = store.graph.nodes[child].directory / ATTESTATION / EVALUATED_CARD
        # An evaluation of any kind holds the card of the policy it judged, and of none of its other parents.
        with contextlib.suppress(OSError, ValueError):
            content = b"" if card.parent.is_symlink() else read_bounded(card)
            if CHECKPOINT_LINE.format(node.sha256).encode() in content:
                allowed.add(hashlib.sha256(content).hexdigest())
    if path.is_symlink() or not path.is_file():
        yield Finding(node.name, "card-missing", f"{CARD} is missing, or not a file")
    elif path.stat().st_size > MAX_RECORD_BYTES or file_sha256(path) not in allowed:
        yield Finding(node.name, "card-changed", f"{CARD} was changed")
