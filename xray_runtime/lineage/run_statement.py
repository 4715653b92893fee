"""What a run left for people, signed when it ended: lifecycle.json, the report, metrics, tables and figures.

    attestations/RUN.json, RUN.sig   an in-toto statement that lists the files by sha256, and its signature

They are written before lifecycle.json says that the run ended, so one that ended is signed, and so is every report but
that of a run at work. Several runs may have left the same file, a stage's metrics for example: the last one counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xray_runtime.files import write_atomic
from xray_runtime.lineage.audit.findings import Finding
from xray_runtime.lineage.signing import SignatureProblem, Verifier, sign
from xray_runtime.lineage.statement import InTotoRecord
from xray_runtime.store.checkpoints import read_bounded
from xray_runtime.store.identity import file_sha256

FOLDER, REPORT = "attestations", "report.html"
ENDED = ("completed", "failed", "interrupted")
"""What lifecycle.json says of a run that ended."""


class RunEnd(BaseModel):
    """Which run ended, and when."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    at: str


class _Record(InTotoRecord[RunEnd]):
    predicate_type: Literal["urn:xray:run:v1"] = Field("urn:xray:run:v1", alias="predicateType")


def sign_run(output: Path, run_id: str, files: Iterable[Path], others: Mapping[Path, str], private_key: Path) -> None:
    """Write and sign what a run leaves.

    Args:
        files: below `output`.
        others: path below `output` → sha256 of what it is about to hold.
    """
    digests = {path: file_sha256(path) for path in files} | dict(others)
    named = {path.relative_to(output).as_posix(): sha256 for path, sha256 in digests.items()}
    record = _Record.model_validate(
        {
            "subject": [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in sorted(named.items())],
            "predicate": RunEnd(run_id=run_id, at=datetime.now(UTC).isoformat(timespec="microseconds")),
        }
    )
    path = _path(output, run_id)
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".sig").unlink(missing_ok=True)
    write_atomic(path, record.to_text())
    temporary = path.with_suffix(".sig.writing")
    sign(path, temporary, private_key)
    os.replace(temporary, path.with_suffix(".sig"))


def begin_run(output: Path, run_id: str) -> None:
    """A run that goes on writes its record anew: it has not ended."""
    _path(output, run_id).unlink(missing_ok=True)


def check_runs(output: Path, verifier: Verifier | None, *, last_only: bool = False) -> Iterator[Finding]:
    """Every file that a run left is what was signed.

    Args:
        last_only: look at the run of lifecycle.json alone.
    """
    last, status = run_on_record(output)
    at_work = status == "running" and not _path(output, last).is_file()
    if at_work:
        # Or killed, or what somebody made of a run that ended: nothing here tells them apart.
        yield Finding("lifecycle.json", "run-open", f"run {last[:12]} has not ended")
    if status in ENDED and not _path(output, last).is_file():
        yield Finding("lifecycle.json", "run-unsigned", f"run {last[:12]} has no statement in {FOLDER}/")
    paths = sorted((output / FOLDER).glob("*.json"))
    records = []
    for path in [p for p in paths if p.stem == last] if last_only else paths:
        name = f"{FOLDER}/{path.name}"
        try:
            record = _Record.model_validate_json(read_bounded(path))
            at = datetime.fromisoformat(record.predicate.at)
            if verifier is not None:
                # To the second, as keys are retired.
                verifier.check(path, path.with_suffix(".sig"), at.isoformat(timespec="seconds"))
            if record.predicate.run_id != path.stem:
                raise ValueError("it is of another run")
        except SignatureProblem as problem:
            yield Finding(name, "run-unsigned", str(problem))
        except (ValidationError, ValueError, OSError, RecursionError) as error:
            yield Finding(name, "run-unsigned", f"it cannot be read ({str(error).splitlines()[0]})")
        else:
            records.append((at, record))
    signed: dict[str, str] = {}
    for _, record in sorted(records, key=lambda found: found[0]):
        signed |= {subject.name: subject.digest.sha256 for subject in record.subject}
    if not at_work and REPORT not in signed and os.path.lexists(output / REPORT):
        yield Finding(REPORT, "run-unsigned", "no statement of a run lists it")
    for name, sha256 in sorted(signed.items()):
        reason = _differs(output, name, sha256, at_work)
        if reason is not None:
            yield Finding(name, "run-changed", reason)


def run_on_record(output: Path) -> tuple[str, str]:
    """(run, status) of lifecycle.json; empty where it cannot be read."""
    try:
        content = json.loads(read_bounded(output / "lifecycle.json"))
        return str(content["run_id"]), str(content["status"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "", ""


def _differs(output: Path, name: str, sha256: str, at_work: bool) -> str | None:
    path = output / name
    if at_work and "/" not in name:
        # A run in this directory, or one that was killed, writes its record anew.
        return None
    if ".." in Path(name).parts or (path.is_absolute() and not path.is_relative_to(output)):
        return "it names a file elsewhere"
    if path.is_symlink() or not path.is_file():
        return "it is missing, or a link"
    return None if file_sha256(path) == sha256 else "its bytes are others"


def _path(output: Path, run_id: str) -> Path:
    return output / FOLDER / f"{Path(run_id).name or 'none'}.json"
