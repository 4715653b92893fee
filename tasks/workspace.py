"""A workspace: a graph whose stages run in an output directory, each as a Prefect task on Ray.

Every call submits its task at once; Ray starts it when its parents are done, so independent branches run in parallel.
Leaving the `with` block waits for all of them. One thread follows the tasks and writes the records.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Set
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from prefect.context import FlowRunContext
from prefect_ray import RayTaskRunner
from prefect_ray.context import remote_options
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from xray.tasks.command import current_command
from xray.tasks.preflight import check_servers, check_services, check_stages
from xray.tasks.register import register as register_task
from xray.tasks.result import Result
from xray.tasks.run_record import RunRecord
from xray.tasks.spec import StageResult, StageSpec
from xray.tasks.stage import stage
from xray.tasks.submitted import SubmittedTask, SubmittedTasks
from xray.tasks.task_runner import task_runner
from xray_runtime.cluster.opening import prestart_models
from xray_runtime.cluster.pool.libraries import STAGE, worker_options
from xray_runtime.cluster.pool.machine import Machine
from xray_runtime.cluster.pool.nodes import node_addresses, nodes, only_node
from xray_runtime.cluster.pool.placement import cluster_machine, with_device
from xray_runtime.cluster.pool.pool import open_worker_pool
from xray_runtime.cluster.progress import open_progress
from xray_runtime.engines.roles import models_of
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.sources import SourceTerms
from xray_runtime.kernel.config.validation import ConfigError, validate_as
from xray_runtime.kernel.cores import load
from xray_runtime.kernel.graph.artifacts import TYPES, Artifact, Benchmark, Evaluation
from xray_runtime.kernel.graph.graph import Graph, StageCall
from xray_runtime.kernel.graph.handles import Handle
from xray_runtime.kernel.graph.stage_identity import code_of
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.kernel.processes import return_freed_memory, tighten_umask
from xray_runtime.kernel.store.function_digest import function_sources
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.kernel.store.syntax import CodeDigestError
from xray_runtime.ops.planner.auto import choose_layouts

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 5
"""Time for the progress actor to answer."""
STOP_SECONDS = 60
"""Time for stages to make their last snapshots when the run is interrupted; longer on a busy machine."""


class StoppedEarly(Exception):
    """The run was asked to end before this stage (`until`)."""


class Workspace(Graph):
    """A graph whose stages run. The other arguments are those of `xray.workspace`.

    Args:
        on_open: called with this workspace once it is open, instead of the command's.
        checked: `check_run` has checked the whole graph already.
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
        terms: Mapping[str, SourceTerms | Mapping[str, Any]] | None = None,
        record: Mapping[str, Any] | None = None,
        run_directory: Path | None = None,
        tags: Mapping[str, str] | None = None,
        tracking_uri: str | None = None,
        on_open: Callable[[Workspace], None] | None = None,
        checked: bool = False,
        **defaults: Any,
    ) -> None:
        if not isinstance(runtime, RuntimeConfig):
            runtime = validate_as(RuntimeConfig, dict(runtime or {}), where="runtime")
        command = current_command()
        super().__init__(seed, runtime, defaults, shorten=command.shorten, fields=command.fields)
        self.output = Path(command.output or output).absolute()
        self.project, self.until = project, command.until or until
        self._on_open, self._checked = on_open or command.on_open, checked
        self.run_record = RunRecord(
            self.output,
            project=project,
            seed=seed,
            storage=self.runtime.storage,
            record=record,
            gates=gates,
            terms={
                source: value if isinstance(value, SourceTerms) else validate_as(SourceTerms, value, f"terms.{source}")
                for source, value in (terms or {}).items()
            },
            run_directory=command.run_directory or run_directory,
            tags=command.tags or tags,
            tracking_uri=command.tracking_uri or tracking_uri,
        )
        self._references: dict[str, CheckpointRef] = {}
        """Checkpoints that existed before the run, by the name of their handles."""
        self._tasks = SubmittedTasks(self._record, self._start_ahead)
        self._prestarted: tuple[set[str], int] | None = None
        """Active stages, and the number of calls, when processes were last started ahead."""
        self._stack = contextlib.ExitStack()

    # Opening and closing

    def __enter__(self) -> Self:
        tighten_umask()
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
            if error is not None and not self.has_failed_with(error):
                self._stop_stages()
            else:
                # After one stage's failure, those that do not need it go on.
                self._wait_for_all()
        except BaseException as late:
            error = late
            raise
        finally:
            self._stack.__exit__(type(error) if error is not None else None, error, None)
        return early

    def _open(self, stack: contextlib.ExitStack) -> None:
        self._runner = self._task_runner(stack)
        self.runtime = with_device(self.runtime)
        node = only_node(self.output)
        if node is None:
            check_servers(node_addresses())
        stack.enter_context(self.run_record)
        self.context = self.run_record.context(node)
        # Stages learn from its answers that they must stop. It lives as long as its handle.
        self.progress = open_progress(self.context.run_id)
        stack.callback(ray.kill, open_worker_pool(self.context.run_id))
        stack.enter_context(self._tasks.following())
        if self._on_open is not None:
            self._on_open(self)

    def _task_runner(self, stack: contextlib.ExitStack) -> RayTaskRunner[Any]:
        context = FlowRunContext.get()
        if context is not None and isinstance(context.task_runner, RayTaskRunner):
            return context.task_runner
        return stack.enter_context(task_runner())  # outside a flow, or in one with another task runner

    # Stages

    def laid_out(self, call: StageCall) -> StageCall:
        if self.runtime.parallel != "auto":
            return call
        call, text = choose_layouts(super().laid_out(call), self._machine, nodes())
        if text is not None:
            log.info(text)
        return call

    @cached_property
    def _machine(self) -> Machine:
        return cluster_machine(self.runtime)

    def directory_of(self, handle: Handle) -> Path:
        return Path(self._references[handle.name].uri)

    def submit(self, call: StageCall) -> None:
        if not self._checked:
            check_stages([call], self.runtime.device, nodes())
            check_services(self, [call], self.runtime.device, self.output)
        if call.kind.registered_in == "__main__":
            raise ConfigError(
                f"{call.name}: stage kind {call.kind.name!r} must be defined in a module that can be imported"
            )
        if self._is_left_out(call):
            return
        spec = StageSpec(
            name=call.name,
            kind=call.kind.name,
            module=call.kind.registered_in,
            config=call.config_json(),
            seed=call.seed,
            runtime=call.runtime,
            code=code_of(call.kind),
            sources=_sources(call),
        )
        task = stage.with_options(
            name=call.name, retries=self.runtime.retries, retry_delay_seconds=self.runtime.retry_delay_s
        )
        parents = {role: self._parent(handle) for role, handle in call.parents.items()}
        parameters = {"spec": spec, "context": self.context, "parents": parents, "functions": call.functions}
        self._run_task(call.name, task, parameters, call.parents.values())

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
            "policy": self._finished_stage(policy),
            "evaluation": self._finished_stage(evaluation) if evaluation is not None else None,
        }
        self._run_task(f"register {parameters['name']}", register_task, parameters, parents.values())

    def _is_left_out(self, call: StageCall) -> bool:
        """Whether `until` was reached, or a parent of the call was left out because of it."""
        reached = self.until is not None and self.until in self._tasks
        return reached or any(h.call is not None and h.name not in self._tasks for h in call.parents.values())

    def _parent(self, handle: Handle) -> Any:
        if handle.call is None:
            return self._references[handle.name].model_dump(mode="json")
        return self._tasks.future(handle.name)

    def _finished_stage(self, handle: Handle) -> Any:
        """The `StageResult` of a handle, for `register`; a checkpoint that existed has one too."""
        if handle.call is None:
            return StageResult.existing(self._references[handle.name]).model_dump(mode="json")
        return self._tasks.future(handle.name)

    def _run_task(self, name: str, task: Any, parameters: dict[str, Any], parents: Iterable[Handle]) -> None:
        # Without SPREAD all tasks, which need no device, would run on the driver's node.
        where = NodeAffinitySchedulingStrategy(self.context.node, soft=False) if self.context.node else "SPREAD"
        # Ray repeats a task whose worker died under the same id, so that dependent tasks keep waiting for it.
        options = {"num_cpus": 0, "max_retries": self.runtime.retries, "scheduling_strategy": where}
        with remote_options(**options, **worker_options(STAGE)):
            future = self._runner.submit(task, parameters)
        self._tasks.add(name, future, [handle.name for handle in parents])

    def checkpoint(self, ref: str) -> Handle:
        """An existing checkpoint from here, another output directory or a bundle, with its ancestors.

        Raises:
            ConfigError: `ref` names no checkpoint, or its audit is not sound.
        """
        checkpoint_found = evidence().checkpoint_from(ref, self.output, self.run_record.tracking_uri)
        name = f"{checkpoint_found.stage}@{checkpoint_found.sha256[:12]}"
        self._references[name] = checkpoint_found
        return Handle(self, name, TYPES.get(checkpoint_found.type, Artifact), None)

    def result_of(self, handle: Handle) -> Result:
        if handle.call is None:
            return self._result(StageResult.existing(self._references[handle.name]))
        if handle.name not in self._tasks:
            raise StoppedEarly(f"{handle.name} is not computed: the run ends with {self.until}")
        return self._result(self._tasks.result(handle.name))

    def _result(self, stage: StageResult) -> Result:
        return Result(stage, self.output, self.run_record.tracking_uri)

    def has_ended(self, stage: str) -> bool:
        """Whether a submitted stage is completed or has failed."""
        return self._tasks.has_ended(stage)

    def has_failed_with(self, error: BaseException | None) -> bool:
        """Whether `error` is a stage's failure."""
        return self._tasks.has_failed_with(error)

    def final_results(self) -> list[Result]:
        """Results of the stages that no other stage uses, evaluations apart."""
        calls = {n: call for n, call in self.calls.items() if call.kind.output not in (Evaluation, Benchmark)}
        used = {handle.name for call in calls.values() for handle in call.parents.values()}
        finished = [self._tasks.finished(name) for name in calls if name not in used]
        return [self._result(stage) for stage in finished if stage is not None]

    # Ends of tasks

    def _record(self, task: SubmittedTask, value: Any, seconds: float) -> Any:
        """Record the result of a task, in the thread that follows them."""
        call = self.calls.get(task.name)
        if call is None:
            self.run_record.summary.registered(value)
            return value
        result = StageResult.model_validate(value)
        self.run_record.summary.stage_done(task.number, result, seconds)
        return result

    def _start_ahead(self) -> None:
        """Start the processes of the next two stages after each active one, since imports take seconds."""
        try:
            progress = ray.get(self.progress.read.remote(), timeout=PROGRESS_SECONDS)
            active = {name for name in progress if not self._tasks.has_ended(name)}
            if self._prestarted == (active, len(self.calls)):
                return
            self._prestarted = active, len(self.calls)
            following = self._following(active)
            for call in [*following, *self._following({call.name for call in following})]:
                prestart_models(models_of(call), call.runtime, self.context.run_id)
        except Exception:
            # The next stage starts missing processes itself, and the following thread must not end.
            log.debug("no processes were started ahead", exc_info=True)

    def _following(self, stages: Set[str]) -> list[StageCall]:
        """The submitted stages that depend on one of `stages`."""
        calls = [call for name, call in list(self.calls.items()) if name in self._tasks]
        return [call for call in calls if any(handle.name in stages for handle in call.parents.values())]

    def _wait_for_all(self) -> None:
        """Wait for all tasks. Raises the first failure."""
        try:
            return_freed_memory()  # from here on this process hardly works
            self._tasks.wait()
        except BaseException:
            self._stop_stages()
            raise
        self._tasks.raise_failure()

    def _stop_stages(self) -> None:
        """Make active stages write a last snapshot, and wait for it."""
        if not self._tasks.all_ended():
            self._tasks.cancel_waiting()
            ray.get(self.progress.stop.remote())
            self._tasks.wait(STOP_SECONDS * load())


def _sources(call: StageCall) -> dict[str, str]:
    try:
        return {file: text for given in call.functions.values() for file, text in function_sources(given).items()}
    except CodeDigestError as error:
        raise ConfigError(f"{call.name}: {error}") from error
