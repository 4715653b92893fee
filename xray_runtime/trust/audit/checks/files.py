"""The files of runs in an audit: records, reports, metrics, tables, figures, pages, and what stages keep.

Every file the log lists must be unchanged, and the directories that people read must hold nothing else. Files that are
no evidence (logs, caches, snapshots of stages that have not ended, unknown files) are notes. Training reads no kept
token, state, snapshot or answer that is not sealed (`kernel.store.seal`); the audit names them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xray_runtime.data.withdrawn import FOLDER as WITHDRAWN
from xray_runtime.kernel.evidence.kept_state import STATE
from xray_runtime.kernel.evidence.log import COSIGNED, END, LIFECYCLE, LOG, REPORT, read_run
from xray_runtime.kernel.evidence.view import LogView, RunBegan
from xray_runtime.kernel.graph.artifacts import Evaluation
from xray_runtime.kernel.history.audit_check import AuditCheck, Audited, Finding, Meaning
from xray_runtime.kernel.history.recorded_rows import RECORDED
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS, read_bounded
from xray_runtime.kernel.store.derived import SUFFIX
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.seal import SEALED, Seal
from xray_runtime.kernel.store.snapshots import SNAPSHOTS, snapshot_problem, snapshot_purpose
from xray_runtime.kernel.tracking.mlflow_tracker import ARTIFACTS
from xray_runtime.kernel.tracking.recorder import RECORDS
from xray_runtime.rewards.journal import ANSWERS, purpose_of_answers, read_writes
from xray_runtime.trust.audit.verified import RECORD, STATE as VERIFIED_STATE
from xray_runtime.trust.bills import CROISSANT
from xray_runtime.trust.published_log import SOURCE

RESULTS, PAGES = "results", "lineage"
MAX_ANSWERS_BYTES = 2**30
MAX_FILE_BYTES = 2**30
"""Larger than any file that a run leaves for people: the log has no sizes, and a sparse file claims any."""
ROOT = {
    *(CHECKPOINTS, RECORDS, RESULTS, PAGES, ARTIFACTS, SNAPSHOTS, LOG, END, COSIGNED, STATE, LIFECYCLE, REPORT),
    *(
        "keys",
        "config.yaml",
        "search.yaml",
        f"{LIFECYCLE}{SEALED}",
        RECORD,
        VERIFIED_STATE,
        "mlflow.db",
        "digests.sqlite",
    ),
    *("logs", "locks", "prefect", "searches", "comparisons", "feedback", "flywheel", "evaluations"),
    *(RECORDED, WITHDRAWN, SOURCE, CROISSANT),
}
"""X-ray's entries of an output directory."""
FOLDERS = {CHECKPOINTS, RECORDS, RESULTS, PAGES, ARTIFACTS, SNAPSHOTS}
BESIDE = "-(journal|wal|shm)$"
"""Ends the names of SQLite's files beside a database."""

CODES = {
    "record-malformed": Meaning(
        "A record of the run cannot be read.", "Run the lifecycle again: it writes the record anew."
    ),
    "record-differs": Meaning(
        "lifecycle.json does not agree with the checkpoints.",
        "Run the lifecycle again: it writes the record anew. Missing checkpoints may be restored with `xray fetch`.",
    ),
    "run-unsigned": Meaning(
        "The record or the report of a run is not signed.", "Run the lifecycle again: it writes and signs them anew."
    ),
    "run-changed": Meaning(
        "A file that a run left (its record, report, metrics, a table, figure or page) differs from the one it signed.",
        "Run the lifecycle again: it writes the record and the report anew. The rest comes from a copy.",
    ),
    "file-unsigned": Meaning("A file among the records was written by no run.", "Remove it, and ask who put it there."),
    "run-open": Meaning(
        "A run is in progress or was killed: its record is not signed yet.",
        "Run the lifecycle to its end: it signs it.",
        is_note=True,
    ),
    "file-unknown": Meaning("The file is not one of the records: nothing that is signed covers it.", "", is_note=True),
    "snapshot-left": Meaning(
        "Snapshots from which a stage would resume.",
        "Run the lifecycle to its end, or remove them: the stage then starts over.",
        is_note=True,
    ),
    "kept-unsealed": Meaning(
        "Tokens, log-probabilities, a snapshot or answers that a stage kept were planted or edited, or are of an older "
        "version of X-ray. Training does not read them.",
        "Ask who changed it; remove it: what is needed is computed again.",
    ),
}


def check_files(store: LineageStore, view: LogView) -> Iterator[Finding]:
    """Every file of the log, every record of a run, and files that are in no entry."""
    output, open_runs = store.output, view.open_runs(store.output)
    directories = {view.runs[run_id].run_directory for run_id in view.runs}
    at_work = set[str]()
    for directory in sorted(directories | {""}):
        name = f"{directory}/{LIFECYCLE}".lstrip("/")
        content = read_run(output / directory)
        run_id = str(content.get("run_id", ""))
        if run_id in open_runs and view.runs[run_id].run_directory == directory:
            at_work.add(name)
            yield Finding(name, "run-open", f"run {run_id[:12]} has not ended")
            yield from _check_open(name, view.runs[run_id], content)
        elif name not in view.files and os.path.lexists(output / name):
            yield Finding(name, "run-unsigned", f"no run in {LOG} left it")
        elif directory in directories and name not in view.files:
            yield Finding(name, "run-open", "a run began but left no record")
    for name, sha256 in sorted(view.files.items()):
        if name not in at_work and not name.startswith(f"{CHECKPOINTS}/"):
            reason = _differs(output, name, sha256)
            # A missing result is computed, or found, again.
            if reason is not None and not (name.startswith(f"{RESULTS}/") and not os.path.lexists(output / name)):
                yield Finding(name, "run-changed", reason)
    yield from _extra(output, view, bool(open_runs))


def check_record(store: LineageStore, view: LogView) -> Iterator[Finding]:
    """lifecycle.json against the checkpoints it names."""
    path = store.output / LIFECYCLE
    if not os.path.lexists(path):
        return
    try:
        content = json.loads(read_bounded(path))
        stages = {s["name"]: (str(s["checkpoint"]["sha256"]), sorted(s["parents"])) for s in content["stages"]}
        evaluation = content.get("evaluation")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        yield Finding(LIFECYCLE, "record-malformed", f"{type(error).__name__}: not a record of a lifecycle")
        return
    evaluations = []
    for name, (sha, parents) in stages.items():
        node = store.graph.nodes.get(sha)
        if node is None and sha in view.pruned:
            continue
        if node is None:
            yield Finding(LIFECYCLE, "record-differs", f"{name} {sha[:12]} is not in the store")
        elif node.manifest.stage != name or sorted(set(node.manifest.parents.values())) != parents:
            yield Finding(LIFECYCLE, "record-differs", f"{name}: stage or parents are not the checkpoint's")
        elif node.is_a(Evaluation):
            evaluations.append(node.results)
    if evaluation is not None and evaluations and evaluation not in evaluations:
        yield Finding(LIFECYCLE, "record-differs", "the evaluation is not the one in the store")


def _check_open(name: str, run: RunBegan, content: Mapping[str, Any]) -> Iterator[Finding]:
    """The record of a run that has not ended."""
    differing = [name for name, value in run.facts.items() if content.get(name) != value]
    if content.get("status") == "completed":
        differing.append("status")
    if differing:
        yield Finding(name, "run-changed", f"it differs from what the run began with: {', '.join(differing)}")


def _differs(output: Path, name: str, sha256: str) -> str | None:
    path = output / name
    if ".." in Path(name).parts or not path.is_relative_to(output):
        return "it names a file elsewhere"
    inside = [path, *list(path.parents)[: len(Path(name).parts) - 1]]
    try:
        if any(part.is_symlink() for part in inside) or not path.is_file():
            return "it is missing, or a link"
        return None if file_sha256(path, MAX_FILE_BYTES) == sha256 else "its bytes were changed"
    except (OSError, ValueError) as error:
        return f"it cannot be read ({getattr(error, 'strerror', None) or error})"


def _extra(output: Path, view: LogView, is_open: bool) -> Iterator[Finding]:
    """Files that are in no entry of the log."""
    listed = {str(parent) for name in view.files for parent in Path(name).parents}
    for entry in sorted(output.iterdir()):
        if entry.is_symlink():
            yield Finding(entry.name, "file-link", "a link is in place of a file or directory of the run")
        elif re.sub(BESIDE, "", entry.name) not in ROOT and entry.name not in view.files:
            yield Finding(entry.name, "file-unknown", "no run put it there")
        elif entry.name == REPORT and REPORT not in view.files:
            yield Finding(REPORT, "run-unsigned", f"no run in {LOG} left it")
        elif entry.name in FOLDERS and not entry.is_dir():
            yield Finding(entry.name, "file-unsigned", "it is no directory")
        elif entry.name == SNAPSHOTS and any(entry.iterdir()):
            names = ", ".join(sorted(path.name for path in entry.iterdir())[:8])
            yield Finding(entry.name, "snapshot-left", f"of stages that have not finished: {names}")
        elif entry.name == CHECKPOINTS:
            for path in sorted(entry.iterdir()):
                if not path.is_dir():
                    yield Finding(f"{CHECKPOINTS}/{path.name}", "file-unknown", "it is no checkpoint")
    for folder in (RECORDS, RESULTS, PAGES, SOURCE, CROISSANT, ARTIFACTS):
        unfinished = set[str]()
        for name in _below(output, folder):
            # A record's seal is of no use once the log has the record.
            if name in view.files or (folder == RECORDS and name.removesuffix(SEALED) in view.files):
                continue
            holder = Path(*Path(name).parts[:2]).with_suffix("") if folder == RESULTS else Path(*Path(name).parts[:2])
            of_stage = (folder not in (PAGES, SOURCE, CROISSANT) and len(Path(name).parts) > 2) or folder == RESULTS
            # Files of a stage that failed or has not ended are not signed yet.
            ended = holder.name in view.published or str(holder) in listed
            # MLflow loads a model from there, and X-ray puts none there.
            of_stage = of_stage and str(holder) != f"{ARTIFACTS}/models"
            if of_stage and (is_open or not ended):
                unfinished.add(str(holder))
            else:
                yield Finding(name, "file-unsigned", f"no entry of {LOG} lists it")
        for holder_name in sorted(unfinished):
            yield Finding(holder_name, "file-unknown", "of a run or a stage that did not end")


def _below(output: Path, folder: str) -> list[str]:
    """Files and links below `folder`; links are not followed."""
    found = []
    for folder_path, directories, names in os.walk(output / folder):
        there = [*names, *(name for name in directories if os.path.islink(os.path.join(folder_path, name)))]
        found += [Path(folder_path, name).relative_to(output).as_posix() for name in there]
    return sorted(found)


def check_kept(output: Path, public_keys: Sequence[bytes], hashing: bool) -> Iterator[Finding]:
    """Every kept file that no trusted key sealed.

    Args:
        hashing: without it the large ones are not read.
    """
    seal = Seal(None, public_keys)
    if hashing:
        for folder in sorted((output / CHECKPOINTS).glob(f"*{SUFFIX}")):
            for path in sorted(folder.iterdir()) if folder.is_dir() else []:
                # Seals, locks, and files of a process that was killed while writing.
                beside = path.suffix in (SEALED, ".lock", ".building") or path.suffix.startswith(".writing-")
                if not beside and not seal.is_sealed(path):
                    yield _finding(output, path, "it is not sealed")
    for stage in sorted((output / SNAPSHOTS).glob("*")):
        for snapshot in sorted(stage.glob("step-" + "[0-9]" * 10)) if hashing else []:
            problem = snapshot_problem(snapshot, snapshot_purpose(snapshot), seal)
            if problem is not None:
                yield _finding(output, snapshot, problem)
        yield from _check_answers(output, stage / ANSWERS, seal)


def _check_answers(output: Path, path: Path, seal: Seal) -> Iterator[Finding]:
    if not os.path.lexists(path):
        return
    try:
        content = read_bounded(path, MAX_ANSWERS_BYTES)
    except (OSError, ValueError) as error:
        yield _finding(output, path, f"it cannot be read ({type(error).__name__})")
        return
    total, unsealed = 0, list[int]()
    for lines, entries in read_writes(content, purpose_of_answers(path.parent), seal):
        unsealed += range(total + 1, total + 1 + len(lines)) if entries is None else ()
        total += len(lines)
    if unsealed:
        yield _finding(output, path, f"{len(unsealed)} of its lines are not sealed, the first is {unsealed[0]}")


def _finding(output: Path, path: Path, reason: str) -> Finding:
    return Finding(path.relative_to(output).as_posix(), "kept-unsealed", reason)


def _check(audited: Audited) -> Iterator[Finding]:
    yield from check_record(audited.store, audited.log)
    yield from check_files(audited.store, audited.log)
    hashing = audited.hashing and not audited.since_verified
    yield from check_kept(audited.store.output, audited.public_keys, hashing)


CHECK = AuditCheck(
    "records, reports, metrics, tables, figures and pages that runs left, and what stages keep",
    CODES,
    _check,
    needs=frozenset({"whole"}),
)
