"""A workspace: an output directory at work. A graph whose stages run, each as a Prefect task on Ray.

Every call submits its task at once; Ray starts it when its parents are done, so independent branches run side by side.
Leaving the `with` block waits for all of them. One thread follows the tasks and keeps the records.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import ray
import yaml
from filelock import FileLock
from prefect.artifacts import create_link_artifact
from prefect.context import FlowRunContext
from prefect_ray import RayTaskRunner
from prefect_ray.context import remote_options
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from xray.tasks.flow_context import flow_parameters, prefect_tags, trigger_of_run
from xray.tasks.output_directory import LOCKS, run_lock, unfinished_run
from xray.tasks.prefect_state import crash_lost_flow_run
from xray.tasks.preflight import check_servers
from xray.tasks.register import register as register_task
from xray.tasks.run_summary import RunSummary
from xray.tasks.spec import RunContext, StageResult, StageSpec, forwarded_variables
from xray.tasks.stage import stage
from xray.tasks.submitted import SubmittedTask, SubmittedTasks
from xray.tasks.task_runner import task_runner
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.config.validation import ConfigError, validate_as
from xray_runtime.credentials import tracking_address
from xray_runtime.errors import is_cancelled
from xray_runtime.lineage.adopt import checkpoint_from
from xray_runtime.lineage.keys import exchange_keys
from xray_runtime.lineage.signing import signing_key
from xray_runtime.planning.demand import check_call
from xray_runtime.progress import open_progress
from xray_runtime.stages.artifacts import TYPES, Artifact, Evaluation
from xray_runtime.stages.graph import Graph, Handle, StageCall
from xray_runtime.stages.identify import code_of
from xray_runtime.store.function_digest import function_sources
from xray_runtime.store.ref import CheckpointRef
from xray_runtime.store.shared import open_shared
from xray_runtime.store.syntax import CodeDigestError
from xray_runtime.tracking.database import prepare_mlflow_database
from xray_runtime.tracking.mlflow_tracker import Tracker
from xray_runtime.workers.nodes import current_node, is_on_all_nodes, node_addresses, nodes
from xray_runtime.workers.placement import with_device
from xray_runtime.workers.pool import open_worker_pool

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

STOP_SECONDS = 60
"""How long stages have for their last snapshots when the run is interrupted."""

on_open: contextvars.ContextVar[Callable[[Workspace], None] | None] = contextvars.ContextVar("on_open", default=None)
"""Called with every workspace that opens: whoever shows progress."""


@dataclass(frozen=True)
class Overrides:
    """What a command line says of the workspace that a flow opens."""

    output: str | None = None
    until: str | None = None
    shorten: bool = False


overrides: contextvars.ContextVar[Overrides | None] = contextvars.ContextVar("overrides", default=None)


class StoppedEarly(Exception):
    """The run was asked to end before this stage (`until`)."""


@dataclass(frozen=True)
class Result:
    """A finished stage."""

    stage: StageResult
    workspace: Workspace

    @property
    def path(self) -> Path:
        """Directory of its checkpoint."""
        return self.stage.checkpoint.path

    @property
    def sha256(self) -> str:
        """Digest of the checkpoint's manifest, which lists every file with its own."""
        return self.stage.checkpoint.sha256

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric it recorded."""
        return {name: points[-1][1] for name, points in self._series().items()}

    def figure(self) -> Figure | None:
        """Its training curves, as the report shows them; None of a stage that has none."""
        from xray_runtime.report.figures import training_figure
        from xray_runtime.stages.kind import find_kind

        kind = find_kind(self.stage.kind)
        return training_figure(kind.panels, self._series()) if kind is not None else None

    def _series(self) -> dict[str, list[tuple[int, float]]]:
        from xray_runtime.report.figures import read_metrics
        from xray_runtime.tracking.recorder import METRICS, records_directory

        return read_metrics(records_directory(self.workspace.output, self.stage.name, self.stage.key) / METRICS)

    def lineage(self) -> str:
        """Where it came from, as a tree."""
        from xray_runtime.lineage.reference import open_lineage_store
        from xray_runtime.lineage.render import lineage_text

        store = open_lineage_store(self.workspace.output, self.workspace.tracking_uri)
        return "\n".join(lineage_text(store.graph, store.graph.nodes[self.sha256], False))


class Workspace(Graph):
    """A graph whose stages run.

    Args:
        output: directory of everything the run makes.
        project: MLflow's experiment; a policy is registered as `<project>-policy`.
        seed: every random choice derives from it.
        runtime: where and how the work runs.
        until: the stage after which nothing more is computed.
        gates: what a candidate must pass to be promoted; goes into the signed record of its evaluation.
        record: the config of the whole run, for MLflow and lifecycle.json; by default the flow's parameters.
        place: directory of lifecycle.json and the report; by default `output`.
        tags: of the MLflow run.
        tracking_uri: MLflow's address; by default MLFLOW_TRACKING_URI, or a database in `output`.
        defaults: fields for every stage that has them: `generator`, `frozen`, `gold`.
    """

    def __init__(
        self,
        output: str | Path = "runs/xray",
        *,
        project: str = "xray",
        seed: int = 0,
        runtime: RuntimeConfig | Mapping[str, Any] | None = None,
        until: str | None = None,
        gates: Mapping[str, Any] | None = None,
        record: Mapping[str, Any] | None = None,
        place: Path | None = None,
        tags: Mapping[str, str] | None = None,
        tracking_uri: str | None = None,
        **defaults: Any,
    ) -> None:
        if not isinstance(runtime, RuntimeConfig):
            runtime = validate_as(RuntimeConfig, dict(runtime or {}), where="runtime")
        said = overrides.get() or Overrides()
        super().__init__(seed, runtime, defaults, shorten=said.shorten)
        self.output = Path(said.output or output).absolute()
        self.project, self.until = project, said.until or until
        self._gates, self._record, self._tags = gates, record, dict(tags or {})
        self._place, self._address = place or self.output, tracking_uri
        self._references: dict[str, CheckpointRef] = {}
        """Checkpoints that existed already, by the name of their handles."""
        self._tasks = SubmittedTasks(self._take)
        self._stack = contextlib.ExitStack()

    # Opening and closing

    def __enter__(self) -> Self:
        self.output.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        super().__exit__(kind, error, trace)
        early = isinstance(error, StoppedEarly)
        error = None if early else error
        try:
            if error is not None:
                # Stages at work make a last snapshot: the same run goes on from it.
                self._stop_stages()
            else:
                self._wait_for_all()
        except BaseException as late:
            error = late
            raise
        finally:
            self._stack.__exit__(type(error) if error is not None else None, error, None)
        return early

    def _open(self, stack: contextlib.ExitStack) -> None:
        (self.output / LOCKS).mkdir(parents=True, exist_ok=True)
        self._runner = self._task_runner(stack)
        self.runtime = with_device(self.runtime)
        self._node = only_node(self.output)
        if self._node is None:
            check_servers(node_addresses())
        record = dict(self._record) if self._record is not None else flow_parameters()
        record = {"project": self.project, "seed": self.seed} | record
        signing_key(self.output)
        exchange_keys(self.output, open_shared(self.runtime.storage))
        self._open_tracker()
        before = unfinished_run(self._place, self.output, record)
        flow_run_id, _ = trigger_of_run()
        if before is not None:
            crash_lost_flow_run(before["flow_run_id"], flow_run_id)
        self.context = self._start_run(record, before)
        stack.enter_context(run_lock(self.output, self.context.run_id))
        stack.push(self._end_run)
        self.summary = RunSummary(self.output, self._place, record, self.context.run_id, flow_run_id)
        page = self.tracker.page(self.context.run_id)
        if page is not None and flow_run_id is not None:
            create_link_artifact(page, link_text="this run in MLflow", key="mlflow", description=str(self.output))
        # Stages hear of an interruption through its answers; it lasts as long as somebody holds it.
        self.progress = open_progress(self.context.run_id)
        pool = open_worker_pool(self.context.run_id)
        stack.callback(ray.kill, pool)
        stack.enter_context(self._tasks.following())
        watch = on_open.get()
        if watch is not None:
            watch(self)

    def _task_runner(self, stack: contextlib.ExitStack) -> RayTaskRunner[Any]:
        context = FlowRunContext.get()
        if context is not None and isinstance(context.task_runner, RayTaskRunner):
            return context.task_runner
        # Outside of a flow, or in one with another task runner.
        return stack.enter_context(task_runner())

    def _open_tracker(self) -> None:
        own = f"sqlite:///{self.output / 'mlflow.db'}"
        uri = self._address or tracking_address() or own
        artifacts = None if uri != own else self.output / "mlartifacts"
        self.tracking_uri = uri
        # Of several processes that make the same new database, all but one fail.
        with FileLock(self.output / LOCKS / "mlflow.lock"):
            if uri == own:
                prepare_mlflow_database(self.output / "mlflow.db")
            self.tracker = Tracker(self.tracking_uri, self.project, artifacts)

    def _start_run(self, record: dict[str, Any], before: dict[str, Any] | None) -> RunContext:
        flow_run_id, trigger = trigger_of_run()
        tags = prefect_tags()
        page = tags.get("prefect.flow_run")
        run_id = self.tracker.start_lifecycle(
            before["run_id"] if before is not None else None,
            f"{self.project} seed {self.seed}",
            record,
            yaml.safe_dump(record, sort_keys=False, allow_unicode=True),
            {"xray.output": str(self.output)}
            | self._tags
            | tags
            | ({"mlflow.note.content": f"[Prefect flow run]({page})"} if page else {}),
        )
        return RunContext(
            output=str(self.output),
            tracking_uri=self.tracking_uri,
            experiment=self.project,
            run_id=run_id,
            flow_run_id=flow_run_id,
            trigger=trigger,
            gates=dict(self._gates) if self._gates is not None else None,
            node=self._node,
            tags=tags,
            variables=forwarded_variables(),
            path=tuple(p for p in sys.path if p and "site-packages" not in p and Path(p).is_dir()),
        )

    def _end_run(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        self.summary.ended("completed" if error is None else "failed")
        if error is None:
            self.tracker.log_files(self.context.run_id, self.summary.path, self.summary.report)
        status = "FINISHED" if error is None else "KILLED" if is_cancelled(error) else "FAILED"
        self.tracker.finish(self.context.run_id, status)

    # Stages

    def submit(self, call: StageCall) -> None:
        check_call(call, self.runtime, self.runtime.device, nodes())
        if call.kind.registered_in == "__main__":
            raise ConfigError(f"{call.name}: stage kind {call.kind.name!r} must be defined in a module of its own")
        if self._is_left_out(call):
            return
        spec = StageSpec(
            name=call.name,
            kind=call.kind.name,
            module=call.kind.registered_in,
            config=call.config_json(),
            seed=call.seed,
            runtime=self.runtime,
            code=code_of(call.kind),
            sources=_sources(call),
        )
        task = stage.with_options(
            name=call.name, retries=self.runtime.retries, retry_delay_seconds=self.runtime.retry_delay_s
        )
        parents = {role: self._parent(handle) for role, handle in call.parents.items()}
        parameters = {"spec": spec, "context": self.context, "parents": parents, "functions": call.functions}
        self._run_task(call.name, task, parameters, [handle.name for handle in call.parents.values()])

    def register(self, policy: Handle, evaluation: Handle | None = None, name: str | None = None) -> None:
        """Make a policy the newest version of a registered model, as `candidate`.

        Args:
            evaluation: of the policy; its results go on the model card.
            name: of the registered model; by default `<project>-policy`.
        """
        parents = {"policy": policy} | ({"evaluation": evaluation} if evaluation is not None else {})
        if any(h.call is not None and h.name not in self._tasks for h in parents.values()):
            return
        parameters = {
            "context": self.context,
            "name": name or f"{self.project}-policy",
            "policy": self._parent(policy),
            "evaluation": self._parent(evaluation) if evaluation is not None else None,
        }
        self._run_task(
            f"register {parameters['name']}", register_task, parameters, [handle.name for handle in parents.values()]
        )

    def _is_left_out(self, call: StageCall) -> bool:
        """Whether `until` was reached already, or a parent of the call was left out for that reason."""
        reached = self.until is not None and self.until in self._tasks
        return reached or any(h.call is not None and h.name not in self._tasks for h in call.parents.values())

    def _parent(self, handle: Handle) -> Any:
        if handle.call is None:
            return self._references[handle.name].model_dump(mode="json")
        return self._tasks.future(handle.name)

    def _run_task(self, name: str, task: Any, parameters: dict[str, Any], parents: Sequence[str]) -> None:
        # Spread: a controller has no device, and would else always be beside the driver.
        where = NodeAffinitySchedulingStrategy(self._node, soft=False) if self._node else "SPREAD"
        # A task whose worker or node died is run again by Ray, under the same id: what waits for it stays bound to it.
        with remote_options(num_cpus=0, max_retries=self.runtime.retries, scheduling_strategy=where):
            future = self._runner.submit(task, parameters)
        self._tasks.add(name, future, parents)

    def checkpoint(self, ref: str) -> Handle:
        """A checkpoint that exists already, here, in another output directory or in a bundle, with all it came from.

        Raises:
            ConfigError: `ref` names none, or one whose audit is not sound.
        """
        found = checkpoint_from(ref, self.output, self.tracking_uri)
        name = f"{found.stage}@{found.sha256[:12]}"
        self._references[name] = found
        return Handle(self, name, TYPES.get(found.type, Artifact), None)

    def result_of(self, handle: Handle) -> Result:
        if handle.call is None:
            ref = self._references[handle.name]
            known = StageResult(
                name=ref.stage,
                kind=ref.kind,
                key="",
                checkpoint=ref,
                parents={},
                dataset=None,
                mlflow_run_id="",
                seconds=0.0,
                attempts=0,
            )
            return Result(known, self)
        if handle.name not in self._tasks:
            raise StoppedEarly(f"{handle.name} is not computed: the run ends with {self.until}")
        return Result(self._tasks.result(handle.name), self)

    def has_ended(self, stage: str) -> bool:
        """Whether a submitted stage is done, or has failed."""
        return self._tasks.has_ended(stage)

    def final_results(self) -> list[Result]:
        """Of the stages that no other stage took, evaluations apart: what the run was for."""
        taken = {
            handle.name
            for call in self.calls.values()
            if call.kind.output is not Evaluation
            for handle in call.parents.values()
        }
        names = [n for n, c in self.calls.items() if n not in taken and c.kind.output is not Evaluation]
        finished = [self._tasks.finished(name) for name in names]
        return [Result(stage, self) for stage in finished if stage is not None]

    # Ends of tasks

    def _take(self, task: SubmittedTask, value: Any, seconds: float) -> Any:
        """Note what a task made; in the thread that follows them."""
        call = self.calls.get(task.name)
        if call is None:
            self.summary.registered(value)
            return value
        result = StageResult.model_validate(value)
        self.summary.stage_done(task.number, result, seconds)
        if call.kind.output is Evaluation:
            self.summary.evaluated(result.checkpoint.path)
        return result

    def _wait_for_all(self) -> None:
        """Raises the first failure."""
        try:
            self._tasks.wait()
        except BaseException:
            self._stop_stages()
            raise
        self._tasks.raise_failure()

    def _stop_stages(self) -> None:
        """Have stages at work make a last snapshot, and wait for it."""
        if not self._tasks.all_ended():
            self._tasks.cancel_waiting()
            ray.get(self.progress.stop.remote())
            self._tasks.wait(STOP_SECONDS)


def _sources(call: StageCall) -> dict[str, str]:
    found: dict[str, str] = {}
    for function in call.functions.values():
        try:
            found |= function_sources(function)
        except CodeDigestError as error:
            raise ConfigError(f"{call.name}: {error}") from error
    return found


@functools.cache
def only_node(root: Path) -> str | None:
    """The node that stages must run on, this one, where another does not see the output directory; else None.

    Asked once: what joins later is expected to be like the others.
    """
    if is_on_all_nodes(root):
        return None
    log.warning("%s is not on a disk that all nodes share: stages run on this node, which sends the others files", root)
    return current_node()
