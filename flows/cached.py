"""A lifecycle whose stages are all cached: recorded without Prefect or Ray, and not at all where nothing changed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray.flows.lifecycle_graph import Lifecycle, lifecycle_graph, record_options
from xray.tasks.spec import StageResult
from xray.tasks.stored_results import StoredStage, show_cached, stored_stages
from xray_runtime.kernel.credentials import tracking_address
from xray_runtime.kernel.evidence.log import LIFECYCLE, REPORT, last_entries, read_run
from xray_runtime.kernel.evidence.view import Left, RunEnded
from xray_runtime.kernel.graph.graph import recording
from xray_runtime.kernel.history.evidence import evidence, read_logged
from xray_runtime.kernel.store.checkpoints import Store
from xray_runtime.kernel.store.identity import digest
from xray_runtime.kernel.store.shared import open_shared
from xray_runtime.methods.lifecycle import LifecycleConfig
from xray_runtime.trust.attestation import open_store

if TYPE_CHECKING:
    from xray.tasks.run_record import RunRecord


def take_cached(
    config: LifecycleConfig, output: Path, until: str | None, done: Callable[[str], None]
) -> dict[str, Any] | None:
    """The content of lifecycle.json of a run that computes nothing; None if a stage has to be computed.

    Also None if the environment names a Prefect server, which must show the run, or a Ray cluster. Where the log ends
    with a run of the same config and checkpoints, this one leaves no record: MLflow takes two thirds of its time.

    Args:
        done: called with the name of each stage.
    """
    elsewhere = os.environ.get("PREFECT_API_URL") or os.environ.get("RAY_ADDRESS")
    # Prefect may still show a run that was not completed as running.
    if elsewhere or config.runtime.parallel == "auto" or read_run(output).get("status") != "completed":
        return None
    with recording(config.seed, config.runtime) as graph:
        ends = lifecycle_graph(config)
    store = open_store(output, open_shared(config.runtime.storage))
    stored: dict[str, StoredStage] = {}
    for name, stage in stored_stages(graph, output, store):
        if stage is None:
            return None
        stored[name] = stage
        if name == until:
            break
    if (content := _last_run(config, output, stored)) is not None:
        for name in stored:
            done(name)
        return content
    # Imported late: a run that computes needs it when Prefect and Ray are up.
    from xray.tasks.run_record import RunRecord

    with RunRecord(output, storage=config.runtime.storage, **record_options(config)) as record:
        _record(record, stored, store, ends, done)
    return record.summary.content


def _last_run(config: LifecycleConfig, output: Path, stored: dict[str, StoredStage]) -> dict[str, Any] | None:
    """The content of lifecycle.json of the run in which the log ends, if it had this config and these checkpoints and
    its records are here; its stages are marked as cached."""
    state, path = evidence().trusted_view(output), output / LIFECYCLE
    # Commands that only wrote files changed nothing.
    last = next((entry for entry in last_entries(output, state) if not isinstance(entry, Left)), None)
    records = (path, output / REPORT, output / "mlflow.db")
    # In another store nobody here knows what an alias points to by now.
    if tracking_address() is not None or not isinstance(last, RunEnded) or not all(map(Path.is_file, records)):
        return None
    content = json.loads(read_logged(output, path) or b"{}")
    if content.get("run_id") != last.run_id or content["config_digest"] != digest(record_options(config)["record"]):
        return None
    stages = [(stage["name"], stage["key"], stage["checkpoint"]["sha256"]) for stage in content["stages"]]
    found = [(name, one.result.key, one.result.checkpoint.sha256) for name, one in stored.items()]
    if stages != found or last.status != "completed":
        return None
    same = [stage | {"cached": True, "attempts": 0, "seconds": 0.0} for stage in content["stages"]]
    return content | {"stages": same}


def _record(
    record: RunRecord, stored: dict[str, StoredStage], store: Store, ends: Lifecycle, done: Callable[[str], None]
) -> None:
    from xray.tasks.registration import register

    context, shown = record.context(None), dict[str, StageResult]()
    for number, (name, stage) in enumerate(stored.items()):
        begin = time.perf_counter()
        result = show_cached(stage.result, list(stage.parents.values()), context, record.tracker, store)
        record.summary.stage_done(number, result, time.perf_counter() - begin)
        shown[name] = result
        done(name)
    if ends.policy.name in shown and ends.evaluation.name in shown:
        policy, evaluation = (shown[end.name].model_dump(mode="json") for end in (ends.policy, ends.evaluation))
        record.summary.registered(register(context, f"{record.project}-policy", policy, evaluation))
