"""The chain of decisions about registered models: one signed file each, naming the digest of the one before.

MLflow lets anybody move an alias without a trace. Here every registration, promotion and roll-back is a signed in-toto
statement in `decisions/NNNNNN.json`; an alias that does not point where the last decision put it was moved by hand.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xray_runtime.lineage.audit.findings import Finding
from xray_runtime.lineage.signing import SignatureProblem, Verifier, sign
from xray_runtime.lineage.statement import STATEMENT_TYPE, Subject
from xray_runtime.store.checkpoints import read_bounded
from xray_runtime.store.identity import file_sha256
from xray_runtime.store.manifest import Sha256

FOLDER = "decisions"
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
    evidence: dict[str, Sha256] = Field(default_factory=dict)
    """`evaluation`, `comparison` → the checkpoints the numbers were read from."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    type: Literal["https://in-toto.io/Statement/v1"] = Field(STATEMENT_TYPE, alias="_type")
    subject: list[Subject]
    predicate_type: Literal["urn:xray:decision:v1"] = Field("urn:xray:decision:v1", alias="predicateType")
    predicate: Decision


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
) -> None:
    """Append a decision. The same decision twice in a row is one."""
    files = _files(output)
    last = current(output).get((name, alias))
    if action == "register" and last is not None and (last.version, last.checkpoint) == (version, checkpoint):
        return
    decision = Decision(
        action=action,
        name=name,
        alias=alias,
        version=version,
        checkpoint=checkpoint,
        previous=file_sha256(files[-1]) if files else START,
        by=by or getpass.getuser(),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        note=note,
        gates=gates or [],
        gates_from=gates_from,
        evidence=evidence or {},
    )
    subject = Subject.model_validate({"name": f"{name}/{version}", "digest": {"sha256": checkpoint}})
    record = _Record.model_validate({"subject": [subject], "predicate": decision})
    folder = output / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{len(files) + 1:06}.json"
    # Exclusive: of two that decide at the same time, one must look again.
    with path.open("x", encoding="utf-8") as file:
        content = record.model_dump(mode="json", by_alias=True)
        file.write(json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    sign(path, path.with_suffix(".sig"), private_key)


def current(output: Path) -> dict[tuple[str, str], Decision]:
    """(registered model, alias) → the last decision about it; unreadable decisions are passed over."""
    found = {}
    for path in _files(output):
        try:
            decision = _read(path)
        except (OSError, ValueError):
            continue
        if decision.action in MOVES:
            found[decision.name, decision.alias] = decision
    return found


def pruned(output: Path) -> set[str]:
    """Checkpoints whose removal was decided; unreadable decisions are passed over."""
    found = set()
    for path in _files(output):
        with contextlib.suppress(OSError, ValueError):
            decision = _read(path)
            if decision.action == "prune":
                found.add(decision.checkpoint)
    return found


def check_chain(output: Path, verifier: Verifier | None) -> Iterator[Finding]:
    """Whether every decision is signed, none is missing, and none was changed."""
    previous, signer, retired = START, "", set[str]()
    for number, path in enumerate(_files(output), start=1):
        subject = f"{FOLDER}/{path.name}"
        if path.name != f"{number:06}.json":
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
                if key in retired:
                    yield Finding(subject, "decision-broken", "it was signed with a key that was retired before it")
                retired |= {signer} - {key}
                signer = key
        if decision.previous != previous:
            yield Finding(subject, "decision-broken", "it does not follow the one before")
        previous = file_sha256(path)


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
