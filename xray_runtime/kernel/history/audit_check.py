"""A check of the audit: one object, `CHECK`, in a module of `trust.audit.checks` or of another package.

The audit runs every check that is registered; the meanings of findings and the table in the docs come from them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from xray_runtime.kernel.evidence.envelope import Verifier
from xray_runtime.kernel.evidence.kept_state import FoldedLines
from xray_runtime.kernel.evidence.lines import (
    MAX_BYTES,
    ChainProblem,
    sound_lines,
)
from xray_runtime.kernel.evidence.log import LOG, fold
from xray_runtime.kernel.evidence.view import Head, Line, LogView
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.plugs import Registry
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS, read_bounded

RECOMPUTE = (
    "Restore the directory from a copy (`xray fetch`, where there is a shared store), or move it away and run the "
    "lifecycle again: it computes the same bytes again."
)
ASK = "Find out who changed it, and why, before using the model."
"""Remedies of many findings."""


class Meaning(NamedTuple):
    """The meaning of a code of findings."""

    meaning: str
    remedy: str
    is_note: bool = False
    """Whether an audit is sound with it."""


@dataclass(frozen=True, order=True)
class Finding:
    """One difference from what was recorded."""

    subject: str
    """Checkpoint (stage and digest), or file, or registered model."""
    code: str
    detail: str

    @property
    def is_broken(self) -> bool:
        """False for a note."""
        return not meanings()[self.code].is_note

    def to_json(self) -> dict[str, object]:
        meaning = meanings()[self.code]
        return asdict(self) | {"broken": self.is_broken, "meaning": meaning.meaning, "mend": meaning.remedy}


@dataclass(frozen=True, kw_only=True)
class Audited:
    """The records that an audit checks."""

    store: LineageStore
    log: LogView
    """The state that the sound entries of the log describe."""
    is_log_sound: bool
    """Whether that is the whole log."""
    nodes: Sequence[Node]
    """The checkpoints, parents first."""
    changed: Sequence[Node]
    """Those of them to read; an earlier audit found the others sound."""
    verifier: Verifier | None
    """None without a public key that can be used; the audit says so."""
    public_keys: Sequence[bytes]
    """In PEM."""
    heads: Mapping[str, Head | None]
    """Holder → a head of the log that it kept, which the log must still contain."""
    whole: bool
    """Whether everything in the output directory is audited."""
    hashing: bool
    """Whether the bytes of files are read."""
    since_verified: bool
    """Whether checkpoints are skipped that an earlier audit found sound."""
    witness: str = ""
    """Directory, address or file of the witness to ask; empty: the one that the log names, if it does."""
    witness_key: str = ""
    """Its public key; empty: the one that the log names."""


@dataclass(frozen=True)
class AuditCheck:
    """One check."""

    about: str
    """The comparison it makes, for the docs."""
    codes: Mapping[str, Meaning]
    """The findings that it introduces; it may report those of other checks too."""
    run: Callable[[Audited], Iterable[Finding]] | None = None
    run_checkpoint: Callable[[Audited, Node], Iterable[Finding]] | None = None
    """Called for each changed checkpoint, several at the same time."""
    needs: frozenset[Literal["whole", "hashing"]] = frozenset()
    """The check is run only where the audit is `whole`, or is `hashing`."""

    def applies(self, audited: Audited) -> bool:
        return all(getattr(audited, need) for need in self.needs)


CHECKS = Registry[AuditCheck]("audit check", "xray_runtime.trust.audit.checks", "CHECK", "xray.audit_checks")


@cache
def meanings() -> dict[str, Meaning]:
    """Code → meaning, of the findings of all checks. Raises ValueError where two checks introduce one code."""
    by_code: dict[str, Meaning] = {}
    for name in CHECKS:
        codes = CHECKS.get(name).codes
        if twice := by_code.keys() & codes.keys():
            raise ValueError(f"audit check {name!r}: {min(twice)!r} is not allowed: another check introduces it")
        by_code |= codes
    return by_code


def is_erased(node: Node, log: LogView, path: str) -> bool:
    """Whether a withdrawal erased this file of a checkpoint."""
    return f"{CHECKPOINTS}/{node.directory.name}/{path}" in log.erased


class Chain(Protocol):
    """The state that signed lines describe."""

    def add(self, line: Line) -> None:
        """Fold the next line into it."""


def add_sound_lines(
    view: Chain, lines: Iterator[Line], verifier: Verifier | None, name: str, code: str
) -> list[Finding]:
    """Add the lines of the file `name` to a view, up to the first that is not sound: a finding with this code."""
    try:
        for line in sound_lines(lines, verifier):
            view.add(line)
    except ValueError as error:
        return [_broken(error, name, code)]
    return []


def _broken(error: ValueError, name: str, code: str) -> Finding:
    number = f" {error.number}" if isinstance(error, ChainProblem) else ""
    return Finding(f"{name}{number}", code, str(error))


class CheckedLines(NamedTuple):
    """The lines of a log that an audit checked."""

    folded: FoldedLines
    sha256: str
    """The digest of their bytes."""


def read_log(
    output: Path, verifier: Verifier | None, checked: CheckedLines | None = None
) -> tuple[CheckedLines, list[Finding]]:
    """(the sound lines of the log, findings).

    Args:
        checked: lines that need no other check, if the log begins with the same bytes.
    """
    try:
        content = read_bounded(output / LOG, MAX_BYTES) if os.path.lexists(output / LOG) else b""
    except OSError as error:
        return CheckedLines(FoldedLines(), ""), [Finding(LOG, "log-broken", f"it cannot be read ({error.strerror})")]
    except ValueError as error:
        return CheckedLines(FoldedLines(), ""), [Finding(LOG, "log-broken", str(error))]
    begin = FoldedLines()
    digest = hashlib.sha256()
    if checked is not None:
        digest.update(memoryview(content)[: checked.folded.offset])
        if digest.hexdigest() == checked.sha256:
            begin = checked.folded
        else:
            digest = hashlib.sha256()
    folded, problem = fold(begin, content[begin.offset :], verifier)
    findings = [] if problem is None else [_broken(problem, LOG, "log-broken")]
    digest.update(memoryview(content)[begin.offset : folded.offset])
    if not os.path.lexists(output / LOG):
        findings.append(Finding(LOG, "log-missing", f"there is no {LOG} in {output.name}"))
    return CheckedLines(folded, digest.hexdigest()), findings
