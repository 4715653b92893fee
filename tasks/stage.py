"""The one Prefect task every stage runs as, and what surrounds a stage body: records, MLflow, publication.

The task is a controller: the heavy work sits in the Workhorses it starts, which reserve their own resources.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.context import TaskRunContext
from pydantic import BaseModel, ConfigDict

from xray_runtime.checkpoints.ref import CheckpointRef
from xray_runtime.errors import is_users_error
from xray_runtime.stages.spec import StageSpec

ARTIFACT_SECONDS = 10.0


class RunContext(BaseModel):
    """Where a lifecycle keeps its things."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    output: str
    """Absolute directory of checkpoints, records, logs."""
    tracking_uri: str
    experiment: str
    parent_run_id: str
    """MLflow run of the lifecycle."""
    flow_run_id: str | None = None
    trigger: dict[str, str] = {}
    """What started the flow, and who: for the record."""


class StageResult(BaseModel):
    """What a finished stage tells the flow; small, since it travels through Prefect."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: str
    key: str
    checkpoint: CheckpointRef
    parents: dict[str, str]
    """Role → checkpoint sha256."""
    dataset: str | None
    mlflow_run_id: str
    seconds: float
    attempts: int


def _cache_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
    return f"xray-{parameters['spec'].key}"


def _may_retry(task: Any, task_run: Any, state: Any) -> bool:
    # A plain function: Prefect silently ignores a callable object here.
    error = state.result(raise_on_failure=False)
    return not (isinstance(error, BaseException) and is_users_error(error))


@task(
    cache_key_fn=_cache_key,
    persist_result=True,
    result_serializer="json",
    retry_condition_fn=_may_retry,
    task_run_name="{spec.name} {spec.key}",
)
def stage(spec: StageSpec, context: RunContext) -> dict[str, Any]:
    """Run one stage and publish its checkpoint; returns a `StageResult` as JSON."""
    from xray_runtime.checkpoints.store import Store, load_manifest
    from xray_runtime.lineage.attestation import attest
    from xray_runtime.lineage.recorder import StageRecorder
    from xray_runtime.lineage.signing import signing_key
    from xray_runtime.lineage.statement import RunFacts
    from xray_runtime.lineage.tracking import Tracker
    from xray_runtime.processes import redirect_output
    from xray_runtime.report.figures import read_metrics, training_figure
    from xray_runtime.stages.spec import run_stage

    start, started = time.perf_counter(), datetime.now(UTC)
    output = Path(context.output)
    redirect_output(output / "logs" / spec.name / "stage.log")
    run = Tracker(context.tracking_uri, context.experiment, None).stage_run(
        context.parent_run_id, spec.name, spec.key, spec.sections
    )
    recorder = StageRecorder(output, spec.name, spec.key, run, _progress(spec.name))
    store = Store(output / "checkpoints")
    dataset = spec.parents["dataset"].sha256 if "dataset" in spec.parents else None
    parents = {role: parent.sha256 for role, parent in spec.parents.items()}
    facts = RunFacts(
        flow_run_id=context.flow_run_id,
        task_run_id=_task_run_id(),
        trigger=context.trigger,
        attempts=_attempt(),
        mlflow_run_id=run.run_id,
        mlflow_parent_run_id=context.parent_run_id,
    )
    private_key = signing_key(output)
    record = functools.partial(attest, parents=spec.parents, run=facts, started=started, private_key=private_key)
    try:
        with store.building(spec.name, spec.key) as built:
            step = run_stage(spec, built, recorder)
            figure = training_figure(spec.kind, read_metrics(recorder.metrics_path))
            if figure is not None:
                recorder.figure("training", figure)
            checkpoint = store.publish(
                built,
                stage=spec.name,
                kind=spec.kind,
                key=spec.key,
                step=step,
                seed=spec.seed,
                parents=parents,
                dataset=dataset,
                sections=spec.sections,
                attest=record,
            )
        checkpoint = run.log_checkpoint(checkpoint, load_manifest(checkpoint.path), list(spec.parents.values()))
        run.finish("FINISHED")
    except BaseException:
        run.finish("FAILED")
        raise
    finally:
        recorder.close()
    result = StageResult(
        name=spec.name,
        kind=spec.kind,
        key=spec.key,
        checkpoint=checkpoint,
        parents=parents,
        dataset=dataset,
        mlflow_run_id=run.run_id,
        seconds=time.perf_counter() - start,
        attempts=_attempt(),
    )
    return result.model_dump(mode="json")


def _attempt() -> int:
    context = TaskRunContext.get()
    return context.task_run.run_count if context is not None else 1


def _task_run_id() -> str | None:
    context = TaskRunContext.get()
    return str(context.task_run.id) if context is not None else None


def _progress(stage: str) -> Callable[[str, int, int, str, str], None]:
    """Report to the board at once and to Prefect's page every ARTIFACT_SECONDS."""
    from xray_runtime.progress import reporter

    board = reporter()
    state: dict[str, Any] = {"artifact": None, "sent": 0.0}

    def report(name: str, done: int, total: int, unit: str, note: str) -> None:
        board(name, done, total, unit, note)
        now = time.monotonic()
        if not total or (now - state["sent"] < ARTIFACT_SECONDS and done != total):
            return
        state["sent"] = now
        percent, text = 100.0 * done / total, f"{stage}: {done}/{total} {unit} {note}"
        if state["artifact"] is None:
            state["artifact"] = create_progress_artifact(percent, key=f"xray-{stage}", description=text)
        else:
            update_progress_artifact(state["artifact"], percent, description=text)

    return report
