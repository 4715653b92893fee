"""One attempt at a stage: find its result in the store, or compute, publish and record it.

Only the process of a stage imports this module, which needs MLflow and the store.
"""

from __future__ import annotations

import functools
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from prefect.context import TaskRunContext

from xray.tasks.output_directory import LOCKS
from xray.tasks.progress import StageProgress
from xray.tasks.review import ask_person
from xray.tasks.spec import RunContext, StageResult, StageSpec
from xray.tasks.stored_results import find_result, keep_result, show_cached
from xray.tasks.summary import headline, stage_markdown
from xray.tasks.this_flow import PAGE
from xray_runtime.cluster.device_time import DeviceTime
from xray_runtime.cluster.opening import model_opener
from xray_runtime.cluster.pictures import picture_folders
from xray_runtime.cluster.pool.placement import cluster_machine
from xray_runtime.cluster.readings import Readings
from xray_runtime.cluster.stage import Stage
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.energy import EnergyMeter
from xray_runtime.kernel.errors import (
    NonFiniteError,
    StageOutOfMemoryError,
    WorkerEndedError,
    error_summary,
    is_cancelled,
    is_out_of_memory,
)
from xray_runtime.kernel.evidence.statement import OutsideSource, RunFacts, terms_of
from xray_runtime.kernel.graph.artifacts import dataset_of
from xray_runtime.kernel.graph.kind import StageKind, config_of
from xray_runtime.kernel.graph.stage_identity import identify
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.kernel.processes import on_sigterm
from xray_runtime.kernel.report.figures import drawn_panels, read_metrics, sheet
from xray_runtime.kernel.store.checkpoints import Store, load_manifest
from xray_runtime.kernel.store.content_digest import check_unchanged
from xray_runtime.kernel.store.digest_memory import DIGESTS, DigestMemory
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.kernel.store.shared import open_shared
from xray_runtime.kernel.tracking.mirrors import MIRRORS
from xray_runtime.kernel.tracking.mlflow_tracker import Tracker
from xray_runtime.kernel.tracking.recorder import TRAINING, StageRecorder
from xray_runtime.methods.common.training.finite import naming
from xray_runtime.models.merging import base_of, full_model
from xray_runtime.models.transformers_import import import_transformers

if TYPE_CHECKING:
    from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.rewards.journal import Journal, publish_answers

log = logging.getLogger(__name__)

MAX_DIVISOR = 64


class StageJob:
    """One attempt at a stage; the arguments are those of `stage.stage`."""

    def __init__(
        self,
        spec: StageSpec,
        context: RunContext,
        kind: StageKind,
        parents: Mapping[str, dict[str, Any]],
        functions: Mapping[str, Callable[..., Any]],
    ) -> None:
        self._spec, self._context, self._kind, self._functions = spec, context, kind, functions
        self._output = Path(context.output)
        self._parents = {role: CheckpointRef.model_validate(p.get("checkpoint", p)) for role, p in parents.items()}
        self._config = config_of(kind, spec.config)
        self._memory = DigestMemory(self._output / DIGESTS)
        sha256s = {role: ref.sha256 for role, ref in self._parents.items()}
        self._identity, self._outside = identify(
            kind, spec.name, self._config, spec.seed, spec.runtime, sha256s, dict(functions), self._memory
        )
        self._key = self._identity.key
        self._store = evidence().open_store(self._output, open_shared(spec.runtime.storage))
        self._progress = StageProgress(spec.name, context.run_id)
        self._tracker = Tracker(context.tracking_uri, context.experiment, None)
        self._start, self._started = time.perf_counter(), datetime.now(UTC)
        self._devices, self._readings = DeviceTime(), Readings()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """If several runs need the same stage in one output directory, one computes it and the others wait."""
        (self._output / LOCKS).mkdir(exist_ok=True)
        lock = FileLock(self._output / LOCKS / f"{self._spec.name}-{self._key[:12]}.lock")
        while not lock.is_locked:
            try:
                lock.acquire(timeout=1)
            except Timeout:
                self._progress(self._spec.name, 0, 0, "", "waiting for another run that computes it")
                self._progress.raise_if_stopped()
        try:
            yield
        finally:
            lock.release()

    def find(self) -> StageResult | None:
        """The stored result, recorded in this run's lineage; None if there is none."""
        result = find_result(self._spec.name, self._key, self._output, self._store)
        if result is None:
            return None
        self._progress.cached()
        return show_cached(result, list(self._parents.values()), self._context, self._tracker, self._store)

    def compute(self) -> StageResult:
        """Run the body and publish its checkpoint."""
        spec, context = self._spec, self._context
        run = self._tracker.stage_run(context.run_id, spec.name, self._key, self._identity.config, context.tags)
        recorder = self._open_recorder(run)
        restore = on_sigterm(functools.partial(recorder.interrupt, WorkerEndedError))
        self._energy = EnergyMeter()
        try:
            checkpoint, attempts = self._build(recorder, run.run_id)
            published = {checkpoint.path.name: checkpoint.sha256}
            evidence().log_checkpoints(self._output, published, here=True, renew=True)
            recorder.send()
            series = read_metrics(recorder.metrics_path)
            panels = drawn_panels(self._kind.panels, series)
            if panels:
                recorder.curves("\n".join(panels), sheet(panels))
            checkpoint = run.log_checkpoint(checkpoint, load_manifest(checkpoint.path), list(self._parents.values()))
            result = StageResult(
                name=spec.name,
                kind=spec.kind,
                key=self._key,
                checkpoint=checkpoint,
                parents=self._identity.parents,
                dataset=dataset_of(self._parents.values()),
                mlflow_run_id=run.run_id,
                seconds=time.perf_counter() - self._start,
                attempts=attempts,
            )
            keep_result(result, self._output, self._store, written=recorder.sealed())
            run.finish("FINISHED", attempts)
            recorder.finished()
        except BaseException as error:
            run.finish("KILLED" if is_cancelled(error) else "FAILED", recorder.attempt)
            raise
        finally:
            restore()
            self._energy.end()
            recorder.close()
        image = self._tracker.image(run.run_id, TRAINING) if panels else None
        page = stage_markdown(self._kind, result, series, self._tracker.page(run.run_id), image)
        self._progress.ended(result, headline(self._kind, result, series), page)
        return result

    def _open_recorder(self, run: Any) -> StageRecorder:
        shown = PAGE in self._context.tags
        recorder = StageRecorder(
            self._output,
            self._spec.name,
            self._key,
            run,
            self._progress,
            self._spec.runtime.snapshot_every,
            evidence().seal(self._output),
            self._store.shared,
            (lambda question: ask_person(self._spec.name, question, self._progress)) if shown else None,
            self._spec.runtime.snapshot_every_s,
            MIRRORS.get(self._spec.runtime.mirror),
        )
        self._progress.on_stop = recorder.interrupt
        return recorder

    def _build(self, recorder: StageRecorder, mlflow_run_id: str) -> tuple[CheckpointRef, int]:
        """(the published checkpoint, attempts it took)."""
        spec, store = self._spec, self._store
        # An earlier attempt may have published its checkpoint before it was lost.
        if (checkpoint := store.find(spec.name, self._key)) is not None:
            return checkpoint, recorder.attempt - 1
        attempts = recorder.attempt
        recorder.begin()
        # The start counts as progress: a large model takes long to load.
        self._progress(spec.name, 0, 0, "", "starting")
        for parent in self._parents.values():
            store.ensure_local(parent)
            _ensure_bases(store, parent.path)
        parents = {parent.path.name: parent.sha256 for parent in self._parents.values()}
        evidence().log_checkpoints(self._output, parents, here=False)
        with store.building(spec.name, self._key) as built:
            if self._kind.models(self._config):
                import_transformers()

            with _full_parents(built, self._parents) as paths:

                def body(runtime: RuntimeConfig) -> int:
                    return self._kind.run(self._stage(runtime, recorder, paths), built, recorder)

                step = run_in_memory(spec.name, spec.runtime, built, recorder, body)
            publish_answers(Journal(recorder.kept, recorder.kept_shared, recorder.seal), built)
            for outside in self._outside:
                check_unchanged(outside, self._memory)
            check_numbers(spec.name, built, self._kind.results)
            recorder.seal_metrics()
            facts = self._facts(mlflow_run_id, attempts, built)
            checkpoint = store.publish(
                built,
                self._identity,
                type=self._kind.output.__name__,
                step=step,
                dataset=dataset_of(self._parents.values()),
                attest=evidence().attest(self._output, parents=self._parents, run=facts, started=self._started),
            )
        return checkpoint, attempts

    def _facts(self, mlflow_run_id: str, attempts: int, built: Path) -> RunFacts:
        context, task_run, readings = self._context, TaskRunContext.get(), self._readings.nats
        return RunFacts(
            flow_run_id=context.flow_run_id,
            task_run_id=str(task_run.task_run.id) if task_run is not None else None,
            trigger=context.trigger,
            attempts=attempts,
            mlflow_run_id=mlflow_run_id,
            mlflow_parent_run_id=context.run_id,
            gates=context.gates if self._kind.sides is not None else None,
            readings={self._spec.name if name == built.name else name: nats for name, nats in readings.items()},
            device_seconds=round(self._devices.seconds, 3),
            energy_joules={name: round(joules, 3) for name, joules in self._energy.joules().items()},
            outside=[
                OutsideSource(
                    field=file.field,
                    name=file.name,
                    kind=file.kind,
                    digest=file.digest,
                    terms=terms_of(file, context.terms.get(file.name)),
                )
                for file in self._outside
                # Hashes of what must not be read are no source.
                if file.field != f"{self._spec.name}.withdrawn"
            ],
        )

    def _stage(self, runtime: RuntimeConfig, recorder: StageRecorder, paths: Mapping[str, Path]) -> Stage[Any, Any]:
        inputs = self._kind.inputs_at(paths)
        opener = model_opener(runtime, recorder.log_dir, self._context.run_id, picture_folders(inputs))
        return Stage(
            name=self._spec.name,
            seed=self._spec.seed,
            config=self._config,
            inputs=inputs,
            runtime=runtime,
            open_models=self._devices.measured(self._readings.collected(opener), runtime),
            functions=self._functions,
            kept=recorder.kept,
            kept_shared=recorder.kept_shared,
            seal=recorder.seal,
            too_long=_too_long(runtime),
        )


def _too_long(runtime: RuntimeConfig) -> Callable[[ModelSpec, int], str | None]:
    def found(spec: ModelSpec, tokens: int) -> str | None:
        from xray_runtime.ops.planner.long_rows import too_long

        return too_long(spec, tokens, lambda: cluster_machine(runtime))

    return found


def _ensure_bases(store: Store, directory: Path) -> None:
    """Check, or fetch, the checkpoints with the weights of one that is an adapter alone."""
    while (base := base_of(directory)) is not None:
        ref = CheckpointRef(uri=str(base.directory), sha256=base.sha256, stage="", kind="", type="Model", step=0)
        store.ensure_local(ref)
        directory = base.directory


@contextmanager
def _full_parents(built: Path, parents: Mapping[str, CheckpointRef]) -> Iterator[dict[str, Path]]:
    """The directory of each parent; of one that is an adapter alone, the whole model, which lasts as long as this."""
    # Beside `built`: what a killed process leaves is removed with it.
    scratch = built.with_name(f"{built.name}-inputs")
    scratch.mkdir()
    try:
        yield {role: full_model(parent.path, scratch) for role, parent in parents.items()}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def run_in_memory(
    name: str, runtime: RuntimeConfig, built: Path, recorder: StageRecorder, body: Callable[[RuntimeConfig], int]
) -> int:
    """Run a stage's body; after running out of memory, repeat it from the last snapshot with smaller micro-batches.

    Args:
        built: directory that the body writes into; it is emptied before another attempt.

    Raises:
        StageOutOfMemoryError: `runtime.on_out_of_memory` is "fail", or micro-batches cannot get smaller.
    """
    while True:
        try:
            return body(runtime)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            divisor, reason = runtime.micro_batch_divisor * 2, error_summary(error)
            if runtime.on_out_of_memory == "fail" or divisor > MAX_DIVISOR:
                raise StageOutOfMemoryError(
                    f"{name}: out of memory ({reason}); lower engine.micro_batch_tokens, or raise "
                    f"runtime.micro_batch_divisor (now {runtime.micro_batch_divisor})"
                ) from error
            log.warning("%s: out of memory (%s); continuing with micro-batches 1/%d as large", name, reason, divisor)
            runtime = runtime.model_copy(update={"micro_batch_divisor": divisor})
            for left in built.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            recorder.begin()


def check_numbers(stage: str, built: Path, results: str | None) -> None:
    """Raises NonFiniteError if a weight, or a number in the file of results, is NaN or infinite."""
    with naming(stage):
        if any(built.rglob("*.safetensors")):
            from xray_runtime.models.weight_files import check_finite

            check_finite(built)
        if results is not None and (built / results).is_file():

            def refuse(number: str) -> None:
                raise NonFiniteError(f"{results}: it has the number {number}")

            json.loads((built / results).read_text(encoding="utf-8"), parse_constant=refuse)
