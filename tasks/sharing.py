"""Stages in the shared store: what one machine has computed, another fetches and verifies instead of computing it.

checkpoints/STAGE-KEY/      the checkpoint, its attestation beside it
records/STAGE-KEY/          metrics, tables, figures
results/STAGE-KEY.json      the `StageResult`; written last
snapshots/STAGE-KEY/        of a stage at work
keys/                       public keys of who signed
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

from pydantic import ValidationError

from xray.tasks.summary import StageResult
from xray_runtime.stages.spec import StageSpec
from xray_runtime.store.checkpoints import Store
from xray_runtime.store.shared import DamagedError, SharedStore
from xray_runtime.tracking.recorder import RECORDS, records_directory

log = logging.getLogger(__name__)

RESULTS = "results"


def fetch_result(spec: StageSpec, output: Path, store: Store) -> StageResult | None:
    """The result of a stage that another machine, or another output directory, computed; its files are then here.

    None where it has to be computed. `attempts` is 0: nothing was.
    """
    shared, name = store.shared, f"{spec.name}-{spec.key[:12]}"
    content = shared.read(f"{RESULTS}/{name}.json") if shared is not None else None
    if shared is None or content is None:
        return None
    try:
        result = StageResult.model_validate_json(content)
    except ValidationError:
        log.warning("%s/%s/%s.json: not the result of a stage; it is not used", shared.url, RESULTS, name)
        return None
    checkpoint = store.find(spec.name, spec.key)
    if checkpoint is None:
        return None
    _fetch_records(f"{RECORDS}/{name}", records_directory(output, spec.name, spec.key), shared)
    if checkpoint.sha256 == result.checkpoint.sha256:
        checkpoint = checkpoint.model_copy(update={"mlflow_model_id": result.checkpoint.mlflow_model_id})
    return result.model_copy(update={"checkpoint": checkpoint, "attempts": 0})


def share_result(result: StageResult, output: Path, store: Store) -> None:
    """Bring a stage to the shared store, unless it is there. Raises StorageError."""
    if store.shared is None:
        return
    shared, name = store.shared, f"{result.name}-{result.key[:12]}"
    store.share(result.checkpoint)
    if shared.read(f"{RESULTS}/{name}.json") is None:
        records = records_directory(output, result.name, result.key)
        if records.is_dir():
            shared.put(f"{RECORDS}/{name}", records)
        shared.write(f"{RESULTS}/{name}.json", result.model_dump_json().encode())


def _fetch_records(name: str, place: Path, shared: SharedStore) -> None:
    """Curves and tables for the report; what is here, or cannot be had whole, is left."""
    if place.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=place.parent, prefix=f"{place.name}.fetching-"))
    try:
        if shared.get(name, temporary) is not None:
            temporary.rename(place)
    except DamagedError as error:
        log.warning("%s; the report lacks its curves", error)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
