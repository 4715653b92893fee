"""Results of stages by key, in the output directory and in the shared store.

results/STAGE-KEY.json      the `StageResult`, written last
checkpoints/STAGE-KEY/      the checkpoint, its attestation beside it
records/STAGE-KEY/          metrics, tables, figures
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from pathlib import Path

from pydantic import ValidationError

from xray.tasks.spec import RunContext, StageResult
from xray_runtime.files import write_atomic
from xray_runtime.lineage.log import digests, log_checkpoints, view
from xray_runtime.lineage.signing import signing_key
from xray_runtime.store.checkpoints import Store, load_manifest
from xray_runtime.store.ref import CheckpointRef
from xray_runtime.store.shared import DamagedError, SharedStore
from xray_runtime.tracking.mlflow_tracker import ARTIFACTS, Tracker
from xray_runtime.tracking.recorder import METRICS, RECORDS, read_points, records_directory

log = logging.getLogger(__name__)

RESULTS = "results"


def find_result(name: str, key: str, output: Path, store: Store) -> StageResult | None:
    """The stored result of a stage, after verifying every byte of its checkpoint; its `attempts` is 0.

    None if there is none, so that the stage has to be computed.
    """
    path = _file(output, name, key)
    content = path.read_bytes() if path.is_file() else None
    if content is not None and not _is_logged(output, path, content):
        log.warning("%s: not what was signed; it is not used", path)
        return None
    if content is None and store.shared is not None:
        content = store.shared.read(f"{RESULTS}/{path.name}")
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
    if store.shared is not None:
        _fetch_records(f"{RECORDS}/{path.stem}", records_directory(output, name, key), store.shared)
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
        if path.is_file():
            run.points(read_points(path))
        result = result.model_copy(update={"mlflow_run_id": run.run_id})
    run.finish("FINISHED")
    result = result.model_copy(update={"checkpoint": checkpoint})
    keep_result(result, Path(context.output), store)
    return result.model_copy(update={"mlflow_run_id": run.run_id})


def keep_result(result: StageResult, output: Path, store: Store, *, renew: bool = False) -> None:
    """Store a result in the output directory, the log and the shared store. Raises StorageError.

    Args:
        renew: whether the stage's records were just written.
    """
    path, text = _file(output, result.name, result.key), result.model_dump_json()
    path.parent.mkdir(parents=True, exist_ok=True)
    directory, key = result.checkpoint.path.name, signing_key(output)
    left = [records_directory(output, result.name, result.key), output / ARTIFACTS / result.mlflow_run_id]
    log_checkpoints(output, key, {directory: result.checkpoint.sha256}, digests(output, left), here=True, renew=renew)
    kept = {path.relative_to(output).as_posix(): hashlib.sha256(text.encode()).hexdigest()}
    log_checkpoints(output, key, {directory: result.checkpoint.sha256}, kept, here=True, renew=True)
    write_atomic(path, text)
    if store.shared is None:
        return
    store.share(result.checkpoint)
    if store.shared.read(f"{RESULTS}/{path.name}") is None:
        records = records_directory(output, result.name, result.key)
        if records.is_dir():
            store.shared.put(f"{RECORDS}/{path.stem}", records)
        store.shared.write(f"{RESULTS}/{path.name}", result.model_dump_json().encode())


def _file(output: Path, name: str, key: str) -> Path:
    return output / RESULTS / f"{name}-{key[:12]}.json"


def _is_logged(output: Path, path: Path, content: bytes) -> bool:
    return view(output).files.get(path.relative_to(output).as_posix()) == hashlib.sha256(content).hexdigest()


def _fetch_records(name: str, directory: Path, shared: SharedStore) -> None:
    """Fetch curves and tables for the report, unless they exist or are damaged."""
    if directory.exists():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f"{directory.name}.fetching-"))
    try:
        if shared.get(name, temporary) is not None:
            temporary.rename(directory)
    except DamagedError as error:
        log.warning("%s; the report lacks its curves", error)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
