"""The Prefect task that runs every stage: identity, cache, lock, retries, MLflow run, publication.

The task only controls; the work is done by Workhorses, which reserve their own resources.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext
from prefect.states import Cancelled, Completed

from xray.tasks.flow_context import PAGE
from xray.tasks.out_of_memory import run_in_memory
from xray.tasks.output_directory import DIGESTS, LOCKS
from xray.tasks.progress import StageProgress
from xray.tasks.review import ask_person
from xray.tasks.spec import RunContext, StageResult, StageSpec
from xray.tasks.summary import headline, stage_markdown
from xray_runtime.config.validation import ConfigError
from xray_runtime.errors import NonFiniteError, WorkerEndedError, error_summary, is_cancelled, may_retry

if TYPE_CHECKING:
    from xray_runtime.graph.kind import Stage, StageKind
    from xray_runtime.store.content_digest import Outside
    from xray_runtime.store.identity import Identity
    from xray_runtime.store.ref import CheckpointRef
    from xray_runtime.tracking.recorder import StageRecorder

log = logging.getLogger(__name__)


def _may_retry(task: Any, task_run: Any, state: Any) -> bool:
    # Prefect ignores callable objects here, so this is a function.
    error = state.result(raise_on_failure=False)
    return not isinstance(error, BaseException) or may_retry(error)


@task(cache_policy=NO_CACHE, persist_result=False, retry_condition_fn=_may_retry, task_run_name="{spec.name}")
def stage(
    spec: StageSpec,
    context: RunContext,
    parents: dict[str, Any],
    functions: dict[str, Callable[..., Any]],
) -> Any:
    """Run one stage and publish its checkpoint, or take it from the store; returns a `StageResult` as JSON.

    Args:
        parents: role → the parent's `StageResult`, or a `CheckpointRef`, as JSON.
        functions: reward functions that were given as objects.
    """
    from xray_runtime.cores import give_way
    from xray_runtime.graph.kind import config_of
    from xray_runtime.graph.stage_identity import identify
    from xray_runtime.processes import redirect_output
    from xray_runtime.stages.kinds import import_kind
    from xray_runtime.store.checkpoints import CHECKPOINTS, Store
    from xray_runtime.store.digest_memory import DigestMemory
    from xray_runtime.store.function_digest import remember_sources
    from xray_runtime.store.shared import open_shared

    os.environ |= {name: value.get_secret_value() for name, value in context.variables.items()}
    sys.path += [path for path in context.path if path not in sys.path]
    output = Path(context.output)
    redirect_output(output / "logs" / spec.name / "stage.log")
    give_way(spec.runtime.niceness)
    _log_warnings()
    kind = import_kind(spec.kind, spec.module)
    if kind is None:
        raise ConfigError(f"{spec.name}: stage kind {spec.kind!r} is unknown on {socket.gethostname()}")
    _check_code(spec, kind)
    remember_sources(spec.sources)
    refs = {role: _reference(parent) for role, parent in parents.items()}
    config = config_of(kind, spec.config)
    sha256s = {role: ref.sha256 for role, ref in refs.items()}
    memory = DigestMemory(output / DIGESTS)
    identity, outside = identify(kind, spec.name, config, spec.seed, spec.runtime, sha256s, functions, memory)
    store = Store(output / CHECKPOINTS, open_shared(spec.runtime.storage))
    job = _Job(spec, context, kind, config, identity, outside, refs, functions, store)
    try:
        with _only_one(output, job):
            result = job.find() or job.compute(memory)
    except Exception as error:
        if not is_cancelled(error):
            raise
        # A person asked to stop, so Prefect must not show a failure.
        log.info("%s", error_summary(error))
        return Cancelled(name="Stopped", message=error_summary(error))
    content = result.model_dump(mode="json")
    return Completed(name="Cached", data=content) if result.cached else content


class _Job:
    """One attempt at a stage."""

    def __init__(
        self,
        spec: StageSpec,
        context: RunContext,
        kind: StageKind,
        config: Any,
        identity: Identity,
        outside: list[Outside],
        parents: dict[str, CheckpointRef],
        functions: Mapping[str, Callable[..., Any]],
        store: Any,
    ) -> None:
        from xray_runtime.tracking.mlflow_tracker import Tracker

        self.spec, self.kind, self.identity, self.key = spec, kind, identity, identity.key
        self.progress = StageProgress(spec.name, context.run_id)
        self._context, self._config, self._outside = context, config, outside
        self._parents, self._functions, self._store = parents, functions, store
        self._output = Path(context.output)
        self._tracker = Tracker(context.tracking_uri, context.experiment, None)
        self._start, self._started = time.perf_counter(), datetime.now(UTC)

    def find(self) -> StageResult | None:
        """The stored result, recorded in this run's lineage; None if there is none."""
        from xray.tasks.stored_results import find_result, show_cached

        result = find_result(self.spec.name, self.key, self._output, self._store)
        if result is None:
            return None
        self.progress.cached()
        return show_cached(result, list(self._parents.values()), self._context, self._tracker, self._store)

    def compute(self, memory: Any) -> StageResult:
        """Run the body and publish its checkpoint."""
        from xray.tasks.stored_results import keep_result
        from xray_runtime.lineage.attestation import attest
        from xray_runtime.lineage.keys import seal_of
        from xray_runtime.lineage.log import log_checkpoints
        from xray_runtime.lineage.signing import signing_key
        from xray_runtime.report.figures import read_metrics, training_figure
        from xray_runtime.store.checkpoints import load_manifest
        from xray_runtime.store.content_digest import check_unchanged
        from xray_runtime.tracking.recorder import StageRecorder

        spec, output, store = self.spec, self._output, self._store
        run = self._stage_run()
        shown = PAGE in self._context.tags
        recorder = StageRecorder(
            output,
            spec.name,
            self.key,
            run,
            self.progress,
            spec.runtime.snapshot_every,
            seal_of(output),
            store.shared,
            (lambda question: ask_person(spec.name, question, self.progress)) if shown else None,
        )
        self.progress.on_stop = recorder.interrupt
        _on_sigterm(functools.partial(recorder.interrupt, WorkerEndedError))
        facts, key = self._facts(run.run_id, recorder.attempt), signing_key(output)
        record = functools.partial(attest, parents=self._parents, run=facts, started=self._started, private_key=key)
        try:
            # An earlier attempt may have published its checkpoint before it was lost.
            checkpoint = store.find(spec.name, self.key)
            attempts = recorder.attempt if checkpoint is None else recorder.attempt - 1
            if checkpoint is None:
                recorder.begin()
                # The start counts as progress: a large model takes long to load.
                self.progress(spec.name, 0, 0, "", "starting")
                for parent in self._parents.values():
                    store.bring(parent)
                parents = {parent.path.name: parent.sha256 for parent in self._parents.values()}
                log_checkpoints(output, key, parents, here=False)
                with store.building(spec.name, self.key) as built:
                    step = run_in_memory(
                        spec.name,
                        spec.runtime,
                        built,
                        recorder,
                        lambda runtime: self.kind.run(self._stage(runtime, recorder), built, recorder),
                    )
                    for outside in self._outside:
                        check_unchanged(outside, memory)
                    _check_numbers(spec.name, built, self.kind.results)
                    checkpoint = store.publish(
                        built,
                        self.identity,
                        type=self.kind.output.__name__,
                        step=step,
                        dataset=self._dataset(),
                        attest=record,
                    )
            log_checkpoints(output, key, {checkpoint.path.name: checkpoint.sha256}, here=True)
            recorder.send()
            series = read_metrics(recorder.metrics_path)
            figure = training_figure(self.kind.panels, series)
            if figure is not None:
                recorder.figure("training", figure)
            checkpoint = run.log_checkpoint(checkpoint, load_manifest(checkpoint.path), list(self._parents.values()))
            result = StageResult(
                name=spec.name,
                kind=spec.kind,
                key=self.key,
                checkpoint=checkpoint,
                parents=self.identity.parents,
                dataset=self._dataset(),
                mlflow_run_id=run.run_id,
                seconds=time.perf_counter() - self._start,
                attempts=attempts,
            )
            keep_result(result, output, store, renew=True)
            run.finish("FINISHED", attempts)
            recorder.finished()
        except BaseException as error:
            run.finish("KILLED" if is_cancelled(error) else "FAILED", recorder.attempt)
            raise
        finally:
            recorder.close()
        image = self._tracker.image(run.run_id, "training") if figure is not None else None
        page = stage_markdown(self.kind, result, series, self._tracker.page(run.run_id), image)
        self.progress.ended(result, headline(self.kind, result, series), page)
        return result

    def _stage_run(self) -> Any:
        spec, context = self.spec, self._context
        return self._tracker.stage_run(context.run_id, spec.name, self.key, self.identity.config, context.tags)

    def _dataset(self) -> str | None:
        from xray_runtime.graph.artifacts import dataset_of

        return dataset_of(self._parents.values())

    def _facts(self, mlflow_run_id: str, attempts: int) -> Any:
        from xray_runtime.lineage.statement import OutsideSource, RunFacts
        from xray_runtime.lineage.terms import terms_of

        context, task_run = self._context, TaskRunContext.get()
        return RunFacts(
            flow_run_id=context.flow_run_id,
            task_run_id=str(task_run.task_run.id) if task_run is not None else None,
            trigger=context.trigger,
            attempts=attempts,
            mlflow_run_id=mlflow_run_id,
            mlflow_parent_run_id=context.run_id,
            gates=context.gates if self.kind.sides is not None else None,
            outside=[
                OutsideSource(
                    field=found.field,
                    name=found.name,
                    kind=found.kind,
                    digest=found.digest,
                    terms=terms_of(found, context.terms.get(found.name)),
                )
                for found in self._outside
            ],
        )

    def _stage(self, runtime: Any, recorder: StageRecorder) -> Stage[Any, Any]:
        from xray_runtime.graph.kind import Stage
        from xray_runtime.workers.opening import model_opener

        return Stage(
            name=self.spec.name,
            seed=self.spec.seed,
            config=self._config,
            inputs=self.kind.inputs_at({role: parent.path for role, parent in self._parents.items()}),
            runtime=runtime,
            open_models=model_opener(runtime, recorder.log_dir, self._context.run_id),
            functions=self._functions,
            kept=recorder.kept,
            kept_shared=recorder.kept_shared,
            seal=recorder.seal,
        )


def _reference(parent: dict[str, Any]) -> CheckpointRef:
    from xray_runtime.store.ref import CheckpointRef

    return CheckpointRef.model_validate(parent.get("checkpoint", parent))


@contextmanager
def _only_one(output: Path, job: _Job) -> Iterator[None]:
    """If several runs need the same stage in one output directory, one computes it and the others wait."""
    (output / LOCKS).mkdir(exist_ok=True)
    lock = FileLock(output / LOCKS / f"{job.spec.name}-{job.key[:12]}.lock")
    while not lock.is_locked:
        try:
            lock.acquire(timeout=1)
        except Timeout:
            job.progress(job.spec.name, 0, 0, "", "waiting for another run that computes it")
            job.progress.raise_if_stopped()
    try:
        yield
    finally:
        lock.release()


def _check_code(spec: StageSpec, kind: StageKind) -> None:
    """Raises ConfigError if this node's code differs from the code where the graph was built."""
    from xray_runtime.graph.stage_identity import code_of
    from xray_runtime.store.identity import OTHER_ENVIRONMENT

    here = code_of(kind)
    if here != spec.code:
        changed = sorted(m for m in here.keys() | spec.code.keys() if here.get(m) != spec.code.get(m))
        raise ConfigError(f"{spec.name} on {socket.gethostname()}: {OTHER_ENVIRONMENT} ({changed[0]})")


def _log_warnings() -> None:
    """Log our messages to the stage's log, also if Prefect's handler only lets critical ones pass."""
    root = logging.getLogger()
    if all(handler.level > logging.WARNING for handler in root.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
    for name in ("xray", "xray_runtime"):
        logging.getLogger(name).setLevel(logging.INFO)


def _check_numbers(stage: str, built: Path, results: str | None) -> None:
    """Raises NonFiniteError if a weight, or a number in the file of results, is NaN or infinite."""
    from xray_runtime.training.finite import naming

    with naming(stage):
        if any(built.rglob("*.safetensors")):
            from xray_runtime.models.tensor_file import check_finite

            check_finite(built)
        if results is not None and (built / results).is_file():

            def refuse(number: str) -> None:
                raise NonFiniteError(f"{results}: it has the number {number}")

            json.loads((built / results).read_text(encoding="utf-8"), parse_constant=refuse)


def _on_sigterm(interrupt: Callable[[], None]) -> None:
    """Let the stage make a snapshot when its worker is asked to end (a drained node, say)."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: interrupt())
