"""The files of checkpoints in an audit: bytes, manifests, statements, signatures, cards, and what stages read."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.envelope import SignatureProblem, Verifier
from xray_runtime.kernel.evidence.log import LOG
from xray_runtime.kernel.evidence.statement import Statement, read_statement, verified_statement
from xray_runtime.kernel.evidence.view import LogView
from xray_runtime.kernel.graph.artifacts import Model, RewardModel
from xray_runtime.kernel.history.audit_check import ASK, RECOMPUTE, AuditCheck, Audited, Finding, Meaning, is_erased
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.store.checkpoints import MAX_RECORD_BYTES, inspect, read_bounded
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.manifest import ATTESTATION, CARD, STATEMENT
from xray_runtime.trust.attestation import EVALUATED_CARD, RECORD_FILES, foreign_in_record, has_logged_statement
from xray_runtime.trust.card import CHECKPOINT_LINE
from xray_runtime.trust.model_signature import check_model_signature, signed_files
from xray_runtime.trust.provenance import ROOT

CODES = {
    "manifest-replaced": Meaning("The list of the checkpoint's files differs from the published one.", RECOMPUTE),
    "manifest-inconsistent": Meaning(
        "The manifest's key does not follow from its config, parents, code and versions: it was edited.", RECOMPUTE
    ),
    "unsafe-path": Meaning("The manifest names a file outside its checkpoint; it was not opened.", RECOMPUTE),
    "file-added": Meaning("The checkpoint has a file that was not published with it.", "Remove it if it is harmless."),
    "file-missing": Meaning("A file of the checkpoint is gone.", RECOMPUTE),
    "file-changed": Meaning("A file's bytes are not those that were published.", RECOMPUTE),
    "file-link": Meaning("A file of the checkpoint is a link; it was not followed.", RECOMPUTE),
    "statement-missing": Meaning("The record of how this copy was made is missing.", RECOMPUTE),
    "statement-malformed": Meaning("The record of how this copy was made cannot be read.", RECOMPUTE),
    "statement-contradicts": Meaning("The statement disagrees with the checkpoint or the signed log.", RECOMPUTE),
    "signature-missing": Meaning("The statement or model is not signed.", RECOMPUTE),
    "signature-malformed": Meaning("The signature cannot be read.", RECOMPUTE),
    "signature-foreign": Meaning("The statement or model was signed with another key than the one trusted here.", ASK),
    "signature-retired": Meaning(
        "The statement or model was signed with a key that had been retired: a holder of the old key made it.", ASK
    ),
    "signature-invalid": Meaning(
        "The statement, a file beside it or model.sig was changed after it was signed.", RECOMPUTE
    ),
    "card-missing": Meaning("The model card is gone.", RECOMPUTE),
    "card-changed": Meaning("The model card is neither the one published nor that of a later evaluation.", RECOMPUTE),
    "withdrawn": Meaning(
        "The file held data that was withdrawn (`xray withdraw`): it was erased, and a signed entry says so.",
        "",
        is_note=True,
    ),
    "source-changed": Meaning(
        "The source file has changed since it was read; the data that was read is in the store.", ASK, is_note=True
    ),
    "code-uncommitted": Meaning(
        "It was computed with uncommitted changes, which are in attestation/code.diff.", "", is_note=True
    ),
    "code-unavailable": Meaning(
        "The code's commit is not in this repository.", "Fetch it, or ask who ran it.", is_note=True
    ),
}


def check_checkpoint(audited: Audited, node: Node) -> Iterator[Finding]:
    """One checkpoint's own files."""
    for damage in inspect(node.directory, node.sha256, file_sha256 if audited.hashing else None):
        gone = damage.code == "file-missing" and is_erased(node, audited.log, damage.path)
        yield Finding(node.name, "withdrawn" if gone else damage.code, damage.text)
    yield from _identity(node)
    attested = list(_attestation(audited.store, audited.log, node, audited.verifier))
    yield from attested
    if audited.hashing and audited.verifier is not None and not any(finding.is_broken for finding in attested):
        yield from _check_sources(node)


def _commits(audited: Audited) -> Iterator[Finding]:
    statements = [node.statement for node in audited.changed if node.statement is not None]
    yield from _check_commits({statement.predicate.build.internal.code.git_commit for statement in statements})


def _identity(node: Node) -> Iterator[Finding]:
    manifest, kind = node.manifest, node.kind
    try:
        key = manifest.identity.key
    except (ValueError, RecursionError):
        # X-ray writes no such JSON: NaN, a lone surrogate.
        key = None
    if key != manifest.key:
        yield Finding(node.name, "manifest-inconsistent", "its key does not follow from its content")
    if kind is not None and kind.output.__name__ != manifest.type:
        yield Finding(
            node.name, "manifest-inconsistent", f"a stage of kind {kind.name} does not make a {manifest.type}"
        )
    if manifest.dataset not in (None, *manifest.parents.values()):
        yield Finding(node.name, "manifest-inconsistent", "its dataset is not one of its parents")


def _attestation(store: LineageStore, log: LogView, node: Node, verifier: Verifier | None) -> Iterator[Finding]:
    directory, record = node.directory, node.directory / ATTESTATION
    if record.is_symlink() or not record.is_dir():
        yield Finding(node.name, "statement-missing", f"there is no {ATTESTATION}/")
        return
    if (foreign := foreign_in_record(record)) is not None:
        name, reason = foreign
        code = "statement-malformed" if name in RECORD_FILES and "large" in reason else "file-added"
        yield Finding(node.name, code, f"{ATTESTATION}/{name} {reason}")
        return
    try:
        statement = read_statement(directory)
    except FileNotFoundError:
        yield Finding(node.name, "statement-missing", f"{ATTESTATION}/{STATEMENT} is missing")
        return
    except ValueError as error:
        yield Finding(node.name, "statement-malformed", f"{ATTESTATION}/{STATEMENT}: {first_line(error)}")
        return
    if verifier is not None:
        try:
            verified_statement(directory, verifier)
            if node.is_a(Model, RewardModel):
                files = signed_files(directory, node.manifest, node.sha256)
                check_model_signature(directory, files, verifier, node.finished)
        except SignatureProblem as problem:
            yield Finding(node.name, f"signature-{problem.code}", str(problem))
    logged = log.published.get(directory.name)
    if logged is not None and not has_logged_statement(logged, directory):
        yield Finding(node.name, "statement-contradicts", f"{LOG} names another statement of it")
    differing = statement.contradicts(node.manifest, node.sha256)
    if differing:
        yield Finding(node.name, "statement-contradicts", f"they differ in: {', '.join(differing)}")
    diff = statement.predicate.build.internal.code.diff_sha256
    if diff is not None:
        yield Finding("code", "code-uncommitted", f"changes {diff[:12]}")
    yield from _card(store, node, statement)


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


def _check_sources(node: Node) -> Iterator[Finding]:
    """Local files that the stage read, if they still exist; only those that a sound signature names are opened."""
    if node.statement is None:
        return
    for dependency in node.statement.predicate.build.dependencies:
        if dependency.digest is None or not dependency.uri or dependency.uri.startswith("xray:"):
            continue
        path = Path(dependency.uri)
        if path.suffix == ".gguf":
            # Its digest also covers files next to it.
            continue
        if path.is_absolute() and path.is_file() and not path.is_symlink():
            try:
                actual = file_sha256(path)
            except OSError:
                continue
            if actual != dependency.digest.sha256:
                yield Finding(node.name, "source-changed", f"{dependency.name} {dependency.uri}")


def _check_commits(commits: set[str | None]) -> Iterator[Finding]:
    """Commits that this repository does not have."""
    for commit in sorted(filter(None, commits)) if (ROOT / ".git").exists() else []:
        if len(commit) not in (40, 64) or set(commit) - set("0123456789abcdef"):
            yield Finding("code", "code-unavailable", "the recorded commit is not a valid commit hash")
            continue
        command = ["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}"]
        try:
            known = subprocess.run(command, capture_output=True, timeout=20).returncode == 0
        except (OSError, subprocess.SubprocessError):
            return
        if not known:
            yield Finding("code", "code-unavailable", f"commit {commit[:12]}")


CHECK = AuditCheck(
    "every byte of the checkpoints, their statements, signatures, cards, and the sources that they name",
    CODES,
    run=_commits,
    run_checkpoint=check_checkpoint,
)
