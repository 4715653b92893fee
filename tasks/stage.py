"""The one Prefect task every stage runs as, and what surrounds a stage body: records, MLflow, publication.

The task is a controller: the heavy work sits in the Workhorses it starts, which reserve their own resources.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from prefect import task
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.context import TaskRunContext
from pydantic import BaseModel, ConfigDict, SecretStr

from xray.tasks.results import PLAIN
from xray.tasks.summary import StageResult, stage_markdown
from xray_runtime.config.validation import ConfigError
from xray_runtime.credentials import FORWARDED
from xray_runtime.errors import StageOutOfMemoryError, error_summary, is_cancelled, is_out_of_memory, may_retry
from xray_runtime.progress import find_progress
from xray_runtime.stages.spec import StageSpec
from xray_runtime.store.identity import OTHER_ENVIRONMENT

if TYPE_CHECKING:
    from xray_runtime.tracking.recorder import StageRecorder

log = logging.getLogger(__name__)

ARTIFACT_SECONDS = 10.0
MAX_DIVISOR = 64


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
    node: str | None = None
    """Ray's id of the only node that stages may run on: no other sees `output`. None: any."""
    tags: dict[str, str] = {}
    """By which a stage's MLflow run leads to the flow run."""
    variables: dict[str, SecretStr] = {}
    """Of the flow's environment, what a stage needs on a machine that may lack it; see `travelling_variables`."""


def forwarded_variables() -> dict[str, SecretStr]:
    """`variables` of a `RunContext`. They travel inside Ray alone."""
    return {name: SecretStr(os.environ[name]) for name in FORWARDED if name in os.environ}


def _cache_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
    return f"xray-{parameters['spec'].key}"


def _may_retry(task: Any, task_run: Any, state: Any) -> bool:
    # A plain function: Prefect silently ignores a callable object here.
    error = state.result(raise_on_failure=False)
    return not isinstance(error, BaseException) or may_retry(error)


@task(
    cache_key_fn=_cache_key,
    persist_result=True,
    result_serializer=PLAIN,
    retry_condition_fn=_may_retry,
    task_run_name="{spec.name} {spec.key:.12}",
)
def stage(spec: StageSpec, context: RunContext) -> dict[str, Any]:
    """Run one stage and publish its checkpoint, or fetch it from the shared store; returns a `StageResult` as JSON."""
    from xray.tasks.sharing import fetch_result, share_result
    from xray_runtime.lineage.attestation import attest
    from xray_runtime.lineage.signing import signing_key
    from xray_runtime.lineage.statement import RunFacts
    from xray_runtime.processes import redirect_output
    from xray_runtime.report.figures import read_metrics, training_figure
    from xray_runtime.store.checkpoints import CHECKPOINTS, Store, load_manifest
    from xray_runtime.store.shared import open_shared
    from xray_runtime.tracking.mlflow_tracker import Tracker
    from xray_runtime.tracking.recorder import StageRecorder

    _check_key(spec)
    start, started = time.perf_counter(), datetime.now(UTC)
    os.environ |= {name: value.get_secret_value() for name, value in context.variables.items()}
    output = Path(context.output)
    redirect_output(output / "logs" / spec.name / "stage.log")
    _hear_of_what_happens()
    shared = open_shared(spec.runtime.storage)
    store = Store(output / CHECKPOINTS, shared)
    fetched = fetch_result(spec, output, store)
    if fetched is not None:
        return fetched.model_dump(mode="json")
    tracker = Tracker(context.tracking_uri, context.experiment, None)
    run = tracker.stage_run(context.parent_run_id, spec.name, spec.key, spec.sections, context.tags)
    report = _Progress(spec.name)
    recorder = StageRecorder(output, spec.name, spec.key, run, report, spec.runtime.snapshot_every, shared)
    report.on_stop = recorder.interrupt
    _on_sigterm(recorder.interrupt)
    dataset = spec.parents["dataset"].sha256 if "dataset" in spec.parents else None
    parents = {role: parent.sha256 for role, parent in spec.parents.items()}
    facts = RunFacts(
        flow_run_id=context.flow_run_id,
        task_run_id=_task_run_id(),
        trigger=context.trigger,
        attempts=recorder.attempt,
        mlflow_run_id=run.run_id,
        mlflow_parent_run_id=context.parent_run_id,
    )
    private_key = signing_key(output)
    record = functools.partial(attest, parents=spec.parents, run=facts, started=started, private_key=private_key)
    try:
        # An attempt before this one may have published and been lost before it could say so.
        checkpoint = store.find(spec.name, spec.key)
        if checkpoint is None:
            recorder.begin()
            # That an attempt began is progress too: a large model takes its time to start.
            report(spec.name, 0, 0, "", "starting")
            for parent in spec.parents.values():
                store.bring(parent)
            with store.building(spec.name, spec.key) as built:
                step = _run_in_memory(spec, built, recorder)
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
        recorder.send()
        series = read_metrics(recorder.metrics_path)
        figure = training_figure(spec.kind, series)
        if figure is not None:
            recorder.figure("training", figure)
        checkpoint = run.log_checkpoint(checkpoint, load_manifest(checkpoint.path), list(spec.parents.values()))
        result = StageResult(
            name=spec.name,
            kind=spec.kind,
            key=spec.key,
            checkpoint=checkpoint,
            parents=parents,
            dataset=dataset,
            mlflow_run_id=run.run_id,
            seconds=time.perf_counter() - start,
            attempts=recorder.attempt,
        )
        share_result(result, output, store)
        run.finish("FINISHED", recorder.attempt)
        recorder.finished()
    except BaseException as error:
        run.finish("KILLED" if is_cancelled(error) else "FAILED", recorder.attempt)
        raise
    finally:
        recorder.close()
    image = tracker.image(run.run_id, "training") if figure is not None else None
    _publish(spec.name, stage_markdown(result, series, tracker.page(run.run_id), image))
    return result.model_dump(mode="json")


def _hear_of_what_happens() -> None:
    """Messages of ours go into the stage's log, also where Prefect's own handler lets only the worst pass."""
    root = logging.getLogger()
    if all(handler.level > logging.WARNING for handler in root.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
    for name in ("tasks", "xray_runtime"):
        logging.getLogger(name).setLevel(logging.INFO)


def _check_key(spec: StageSpec) -> None:
    """Raises ConfigError where this node's code or libraries are not those `spec.key` was made with."""
    from xray_runtime.store.identity import stage_key

    parents = {role: parent.sha256 for role, parent in spec.parents.items()}
    if spec.key != stage_key(stage=spec.name, kind=spec.kind, sections=spec.sections, parents=parents):
        raise ConfigError(f"{spec.name} on {socket.gethostname()}: {OTHER_ENVIRONMENT}")


def _publish(stage: str, text: str) -> None:
    try:
        create_markdown_artifact(text, key=f"xray-{stage}-summary", description=f"What {stage} made.")
    except Exception:
        # The stage is done and recorded, whatever becomes of its page.
        log.warning("Prefect did not take the summary", exc_info=True)


def _run_in_memory(spec: StageSpec, built: Path, recorder: StageRecorder) -> int:
    """The stage's body; where memory runs out, again from its last snapshot with smaller micro-batches."""
    from xray_runtime.stages.spec import run_stage

    runtime = spec.runtime
    while True:
        try:
            return run_stage(spec.model_copy(update={"runtime": runtime}), built, recorder)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            divisor = runtime.micro_batch_divisor * 2
            if runtime.on_out_of_memory == "fail" or divisor > MAX_DIVISOR:
                raise StageOutOfMemoryError(
                    f"{spec.name}: out of memory ({error_summary(error)}); lower engine.micro_batch_tokens, or raise "
                    f"runtime.micro_batch_divisor (now {runtime.micro_batch_divisor})"
                ) from error
            log.warning(
                "%s: out of memory (%s); going on with micro-batches 1/%d as large",
                spec.name,
                error_summary(error),
                divisor,
            )
            runtime = runtime.model_copy(update={"micro_batch_divisor": divisor})
            for left in built.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            recorder.begin()


def _on_sigterm(interrupt: Callable[[], None]) -> None:
    """A worker that is asked to end (a drained node, say) lets the stage make a snapshot first."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: interrupt())


def _task_run_id() -> str | None:
    context = TaskRunContext.get()
    return str(context.task_run.id) if context is not None else None


class _Progress:
    """Report to the board at once and to Prefect's page every ARTIFACT_SECONDS; pass on the board's wish to stop."""

    def __init__(self, stage: str) -> None:
        self.on_stop: Callable[[], None] = lambda: None
        self._board = find_progress()
        self._stage = stage
        self._answer: Any = None
        self._artifact: Any = None
        self._sent = 0.0

    def __call__(self, name: str, done: int, total: int, unit: str, note: str) -> None:
        if self._board is not None:
            self._ask(self._board, name, done, total, unit, note)
        now = time.monotonic()
        if not total or (now - self._sent < ARTIFACT_SECONDS and done != total):
            return
        self._sent = now
        percent, text = 100.0 * done / total, f"{self._stage}: {done}/{total} {unit} {note}"
        try:
            if self._artifact is None:
                self._artifact = create_progress_artifact(percent, key=f"xray-{self._stage}", description=text)
            else:
                update_progress_artifact(self._artifact, percent, description=text)
        except Exception:
            # Somebody's page stands still for a while; the training does not.
            log.warning("Prefect did not take the progress", exc_info=True)

    def _ask(self, board: Any, *progress: Any) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            if self._answer is not None and ray.wait([self._answer], timeout=0)[0] and ray.get(self._answer):
                self.on_stop()
            self._answer = board.report.remote(*progress)
