"""Results of stages by key, in the output directory and in the shared store.

results/STAGE-KEY.json      the `StageResult`, written last
published/STAGE-KEY.json    in the shared store alone: the signed entry that lists checkpoint, result and records
checkpoints/STAGE-KEY/      the checkpoint, its attestation beside it
records/STAGE-KEY/          metrics, tables, figures
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from xray.tasks.spec import RunContext, StageResult
from xray_runtime.cluster.device import local_device
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.envelope import HOW_TO_TRUST, SignatureProblem
from xray_runtime.kernel.evidence.lines import LogRecord, parse_line
from xray_runtime.kernel.evidence.log import digests
from xray_runtime.kernel.evidence.view import Line, Published
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.graph.stage_identity import identify
from xray_runtime.kernel.history.evidence import evidence, read_as_signed, read_logged
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS, Store, load_manifest
from xray_runtime.kernel.store.digest_memory import DIGESTS, DigestMemory
from xray_runtime.kernel.store.manifest import MANIFEST
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.kernel.store.shared import DamagedError, SharedStore
from xray_runtime.kernel.tracking.mlflow_tracker import ARTIFACTS, Tracker, table_text
from xray_runtime.kernel.tracking.recorder import METRICS, RECORDS, points_of, records_directory

if TYPE_CHECKING:
    from xray_runtime.kernel.graph.graph import Graph

log = logging.getLogger(__name__)

RESULTS, PUBLISHED = "results", "published"


@dataclass(frozen=True)
class StoredStage:
    result: StageResult
    parents: dict[str, CheckpointRef]
    """Role → its input."""


def stored_stages(graph: Graph, output: Path, store: Store) -> Iterator[tuple[str, StoredStage | None]]:
    """(stage, its verified result), in order; None where it, or one of its inputs, has none."""
    runtime = graph.runtime.model_copy(update={"device": local_device(graph.runtime.device)})
    memory, stages = DigestMemory(output / DIGESTS), dict[str, StageResult]()
    for name, call in graph.calls.items():
        if any(handle.name not in stages for handle in call.parents.values()):
            yield name, None
            continue
        parents = {role: stages[handle.name].checkpoint for role, handle in call.parents.items()}
        sha256s = {role: ref.sha256 for role, ref in parents.items()}
        identity, _ = identify(call.kind, name, call.config, call.seed, runtime, sha256s, call.functions, memory)
        result = find_result(name, identity.key, output, store)
        if result is not None:
            stages[name] = result
        yield name, None if result is None else StoredStage(result, parents)


def find_result(name: str, key: str, output: Path, store: Store) -> StageResult | None:
    """The stored result of a stage, after verifying it and every byte of its checkpoint; its `attempts` is 0.

    The signed log must name a result that is here, and a signed entry one that is in the shared store.

    None if there is none, so that the stage has to be computed.
    """
    path, shared_entry = _file(output, name, key), None
    content = read_logged(output, path) if os.path.lexists(path) else None
    if content is None and os.path.lexists(path):
        return None
    if content is None and store.shared is not None:
        shared_entry = _shared_entry(path.stem, output, store.shared)
        content = _shared_result(path, shared_entry, output, store.shared) if shared_entry is not None else None
    if content is None:
        return None
    try:
        result = StageResult.model_validate_json(content)
    except ValidationError:
        log.warning("%s: not the result of a stage; it is not used", path)
        return None
    if (result.name, result.key) != (name, key):
        log.warning("%s: the result of another stage; it is not used", path)
        return None
    checkpoint = store.find(name, key)
    if checkpoint is None:
        return None
    if shared_entry is not None:
        _bring(shared_entry, checkpoint, output)
    if store.shared is not None:
        _fetch_records(path.stem, output, store.shared)
    if checkpoint.sha256 == result.checkpoint.sha256:
        checkpoint = checkpoint.model_copy(update={"mlflow_model_id": result.checkpoint.mlflow_model_id})
    return result.model_copy(update={"checkpoint": checkpoint, "attempts": 0})


def show_cached(
    result: StageResult, parents: list[CheckpointRef], context: RunContext, tracker: Tracker, store: Store
) -> StageResult:
    """Record a stored result in a run's lineage; returns it with this run's MLflow ids."""
    checkpoint = result.checkpoint
    manifest = load_manifest(checkpoint.path)
    run = tracker.stage_run(context.run_id, result.name, result.key, manifest.identity.config, context.tags)
    if checkpoint.mlflow_model_id and tracker.has_model(checkpoint.mlflow_model_id):
        run.link_cached(checkpoint, manifest, parents)
    else:
        # This tracking store does not have the model yet.
        checkpoint = run.log_checkpoint(checkpoint, manifest, parents)
        path = records_directory(Path(context.output), result.name, result.key) / METRICS
        if (content := read_logged(Path(context.output), path)) is not None:
            run.points(points_of(content))
        result = result.model_copy(update={"mlflow_run_id": run.run_id})
    run.finish("FINISHED")
    result = result.model_copy(update={"checkpoint": checkpoint})
    keep_result(result, Path(context.output), store, written={})
    return result.model_copy(update={"mlflow_run_id": run.run_id})


def keep_result(result: StageResult, output: Path, store: Store, *, written: Mapping[Path, str] | None = None) -> None:
    """Store a result in the output directory, the log and the shared store. Raises StorageError.

    Args:
        written: record → sha256 of the stage's records that were just written: no other files are signed. By default
            all that are there.
    """
    path, text = _file(output, result.name, result.key), result.model_dump_json()
    path.parent.mkdir(parents=True, exist_ok=True)
    directory = result.checkpoint.path.name
    if written is None:
        places = [records_directory(output, result.name, result.key)]
        new = digests(output, places)
    else:
        new = {file.relative_to(output).as_posix(): sha256 for file, sha256 in written.items()}
    new[path.relative_to(output).as_posix()] = hashlib.sha256(text.encode()).hexdigest()
    new |= _artifacts(output, result, new)
    evidence().log_checkpoints(output, {directory: result.checkpoint.sha256}, new, here=True, renew=True)
    write_atomic(path, text)
    if store.shared is not None:
        store.share(result.checkpoint)
        _share_result(path, text, result, output, store.shared)


def _artifacts(output: Path, result: StageResult, written: Mapping[str, str]) -> dict[str, str]:
    """Artifact of the result's MLflow run → sha256, of those that repeat the checkpoint's manifest or a record that was
    `written` or that the log has. Other files may lie beside those that MLflow was sent."""
    signed, artifacts = evidence().trusted_view(output).files, {}
    records = records_directory(output, result.name, result.key).relative_to(output).as_posix()
    for name, sha256 in digests(output, [output / ARTIFACTS / result.mlflow_run_id]).items():
        path = Path(name)
        record = f"{records}/{path.name}"
        expected = written.get(record, signed.get(record))
        if path.name == MANIFEST:
            expected = result.checkpoint.sha256
        elif path.suffix == ".json" and expected is not None:
            content = read_as_signed(output / record, expected)
            table = json.loads(content) if content is not None else {"columns": [], "rows": []}
            expected = hashlib.sha256(table_text(table["columns"], table["rows"]).encode()).hexdigest()
        if sha256 == expected:
            artifacts[name] = sha256
    return artifacts


def _share_result(path: Path, text: str, result: StageResult, output: Path, shared: SharedStore) -> None:
    """Put a result and its records into the shared store with a signed entry, unless it has one that is trusted."""
    if _shared_entry(path.stem, output, shared) is not None and shared.read(f"{RESULTS}/{path.name}") is not None:
        return
    records = records_directory(output, result.name, result.key)
    if records.is_dir():
        shared.put(f"{RECORDS}/{path.stem}", records)
    folder = records.relative_to(output).as_posix()
    files = {
        name: sha256 for name, sha256 in evidence().trusted_view(output).files.items() if name.startswith(f"{folder}/")
    }
    files[path.relative_to(output).as_posix()] = hashlib.sha256(text.encode()).hexdigest()
    files[f"{CHECKPOINTS}/{path.stem}/{MANIFEST}"] = result.checkpoint.sha256
    entry = Published(action="publish", directory=path.stem, checkpoint=result.checkpoint.sha256)
    line = evidence().sign_line(output, LogRecord, entry, files)
    shared.write(f"{RESULTS}/{path.name}", text.encode())
    shared.write(f"{PUBLISHED}/{path.name}", line)


def _shared_entry(name: str, output: Path, shared: SharedStore) -> Line | None:
    """The signed entry about a stage in the shared store; None without one that a trusted key signed."""
    content = shared.read(f"{PUBLISHED}/{name}.json")
    if content is None:
        if shared.read(f"{RESULTS}/{name}.json") is not None:
            log.warning("%s/%s/%s.json: it is not signed; it is not used", shared.url, RESULTS, name)
        return None
    try:
        line = parse_line(1, content, LogRecord)
        evidence().verifier(output).check(line.envelope, line.entry.at)
        if not isinstance(line.entry, Published) or line.entry.directory != name:
            raise ValueError("it is an entry about something else")
    except (OSError, ValueError) as error:
        hint = f"; {HOW_TO_TRUST}" if isinstance(error, SignatureProblem) and error.code == "foreign" else ""
        log.warning("%s/%s/%s.json: %s%s; the result is not used", shared.url, PUBLISHED, name, first_line(error), hint)
        return None
    return line


def _shared_result(path: Path, entry: Line, output: Path, shared: SharedStore) -> bytes | None:
    content = shared.read(f"{RESULTS}/{path.name}")
    expected = entry.files.get(path.relative_to(output).as_posix())
    if content is not None and hashlib.sha256(content).hexdigest() != expected:
        log.warning("%s/%s/%s: not what was signed; it is not used", shared.url, RESULTS, path.name)
        return None
    return content


def _bring(entry: Line, checkpoint: CheckpointRef, output: Path) -> None:
    """Log what a signed entry of the shared store says about a checkpoint that was fetched."""
    if entry.entry.checkpoint == checkpoint.sha256:
        folder = f"{RECORDS}/{checkpoint.path.name}/"
        records = {name: sha256 for name, sha256 in entry.files.items() if name.startswith(folder)}
        published = {checkpoint.path.name: checkpoint.sha256}
        evidence().log_checkpoints(output, published, records, here=False)


def _fetch_records(stage: str, output: Path, shared: SharedStore) -> None:
    """Fetch curves and tables for the report, those that the log names, unless they exist or are damaged."""
    name, directory = f"{RECORDS}/{stage}", output / RECORDS / stage
    signed = {
        path: sha256 for path, sha256 in evidence().trusted_view(output).files.items() if path.startswith(f"{name}/")
    }
    index = None if directory.exists() or not signed else shared.index(name)
    if index is None:
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f"{directory.name}.fetching-"))
    try:
        listed = [entry for entry in index.files if f"{name}/{entry.path}" in signed]
        if {f"{name}/{entry.path}": entry.sha256 for entry in listed} != signed:
            raise DamagedError(f"{shared.url}/{name} is not what was signed")
        shared.get_files(name, index, listed, temporary)
        temporary.rename(directory)
    except DamagedError as error:
        log.warning("%s; the report lacks its curves", error)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _file(output: Path, name: str, key: str) -> Path:
    return output / RESULTS / f"{name}-{key[:12]}.json"
