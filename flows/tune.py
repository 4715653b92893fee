"""The flows of `xray tune`: trials run side by side in threads, and Optuna says which end early.

A trial is a run of the graph with the trial's values, up to the measured stage.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from itertools import islice
from pathlib import Path
from typing import Any

import optuna
import ray
from optuna.trial import TrialState
from prefect import Flow, flow, tags as prefect_tags
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run
from prefect.states import Cancelled

from xray.flows.lifecycle_graph import lifecycle_graph
from xray.flows.lifecycle_run import open_workspace, prepare_deployment
from xray.flows.search import SearchConfig
from xray.flows.study import DIRECTORY, ERROR, VALUES, Search, search_space
from xray.flows.subject import Subject
from xray.flows.tune_report import report, results_markdown
from xray.tasks.command import Command, commanded
from xray.tasks.output_directory import CONFIG
from xray.tasks.prefect_run import crash_lost_flow_run
from xray.tasks.preflight import check_run
from xray.tasks.task_runner import task_runner
from xray.tasks.workspace import STOP_SECONDS, Workspace
from xray_runtime.cluster.pool.nodes import nodes
from xray_runtime.cluster.pool.placement import with_device
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.cores import load
from xray_runtime.kernel.errors import error_summary, is_cancelled, root_cause
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.graph.handles import Handle
from xray_runtime.kernel.graph.stage_identity import identify
from xray_runtime.kernel.report.figures import read_metrics
from xray_runtime.kernel.store.digest_memory import DIGESTS, DigestMemory
from xray_runtime.kernel.store.seal import process_seal
from xray_runtime.kernel.store.shared import open_shared
from xray_runtime.kernel.store.snapshots import Snapshots
from xray_runtime.kernel.tracking.mlflow_tracker import StageRun
from xray_runtime.kernel.tracking.recorder import METRICS, records_directory, snapshots_directory
from xray_runtime.methods.lifecycle import LifecycleConfig
from xray_runtime.methods.loading import resolved_yaml

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
VALUE = "search/value"
"""MLflow metric with the trial's value, for comparing trials in MLflow."""


class UnknownMetricError(ConfigError):
    """The search's metric is not logged, so no trial can finish."""


class TrialRun:
    """A running trial, with its record in Optuna."""

    def __init__(self, search: Search, trial: optuna.Trial) -> None:
        name, self.values = trial.user_attrs[DIRECTORY], trial.user_attrs[VALUES]
        self.number = [known.user_attrs[DIRECTORY] for known in search.trials()].index(name)
        self.has_ended = self.is_pruned = False
        self.text = ", ".join(f"{path} = {json.dumps(value)}" for path, value in self.values.items())
        """Its values; its outcome when it has ended."""
        self._search, self._trial = search, trial
        self._directory = search.directory / "trials" / name
        self._workspace: Workspace | None = None
        self._key = ""
        """Key of the stage whose metric is compared; empty until its parents are done."""
        self._num_reported, self._is_stopping = 0, False

    @property
    def progress(self) -> Any:
        """The progress actor of its run; None before it begins."""
        return self._workspace.progress if self._workspace is not None else None

    def measure(self) -> float:
        """Run the trial; returns its value."""
        wanted, subject = self._search.wanted, self._search.subject.with_values(self.values)
        self._directory.mkdir(parents=True, exist_ok=True)
        if subject.config is not None:
            write_atomic(self._directory / CONFIG, resolved_yaml(subject.config))
        command = Command(
            output=str(self._search.root),
            until=wanted.until,
            on_open=self._opened,
            fields=subject.fields,
            run_directory=self._directory,
            tags={"xray.search": wanted.name, "xray.trial": json.dumps(self.values)},
        )
        with prefect_tags("xray", f"search:{wanted.name}"), commanded(command):
            state: Any = _trial(subject, wanted, self.values, return_state=True)
        if state.is_cancelled():
            raise RuntimeError("the trial's run was stopped")
        state.result()
        if self._workspace is None:
            raise ConfigError(f"{subject.name}: the flow must open a workspace")
        return self._measured(self._workspace)

    def _opened(self, workspace: Workspace) -> None:
        self._workspace = workspace
        if self._is_stopping:
            self.stop()

    def _measured(self, workspace: Workspace) -> float:
        """The value of the trial, which is also recorded in MLflow."""
        wanted = self._search.wanted
        if wanted.pruned_by is not None:
            _last_value(workspace, "prune.metric", *wanted.pruned_by)
        value = _last_value(workspace, "metric", wanted.until, wanted.metric)
        if not math.isfinite(value):
            raise ValueError(f"{wanted.metric} is {value}")
        run = StageRun(workspace.run_record.tracker, workspace.context.run_id)
        run.metrics([(0, int(time.time() * 1000), {VALUE: value})])
        return value

    def points(self) -> Iterator[tuple[int, float]]:
        """(step, value) of the compared metric, as far as it is logged."""
        if self._workspace is None or self._search.wanted.pruned_by is None:
            return
        stage, metric = self._search.wanted.pruned_by
        self._key = self._key or _key(self._workspace, stage)
        if self._key:
            yield from read_metrics(records_directory(self._search.root, stage, self._key) / METRICS).get(metric, [])

    def report_points(self) -> None:
        """Report new points of the compared metric, and stop the trial if it is worse than the others."""
        prune, mode = self._search.wanted.prune, self._search.wanted.mode
        sign = 1.0 if prune is None or prune.mode in (None, mode) else -1.0
        for step, value in self.points():
            if step >= self._num_reported and math.isfinite(value) and not self.is_pruned:
                self._num_reported = step + 1
                self._trial.report(sign * value, self._num_reported)
                if self._trial.should_prune():
                    self.is_pruned = True
                    self.stop()

    def stop(self) -> None:
        """Make the active stages write a last snapshot, and end."""
        self._is_stopping = True
        if self._workspace is not None:
            ray.get(self._workspace.progress.stop.remote())

    def end(self, outcome: Future[float]) -> None:
        """Record the outcome. Raises UnknownMetricError if no trial can finish."""
        self.has_ended, error, study = True, outcome.exception(), self._search.study
        if error is None:
            self.text = f"{self._search.wanted.metric} {outcome.result():.4g}"
            study.tell(self._trial, outcome.result())
        elif self.is_pruned:
            self.text = "pruned"
            self._drop_snapshots()
            study.tell(self._trial, state=TrialState.PRUNED)
        else:
            cause = root_cause(error)
            reason = f"{type(cause).__name__}: {error_summary(error)}"
            self.text = f"failed {reason}"
            self._trial.set_user_attr(ERROR, reason)
            study.tell(self._trial, state=TrialState.FAIL)
            if isinstance(cause, UnknownMetricError):
                raise cause from None

    def _drop_snapshots(self) -> None:
        """Delete the snapshots of the compared stage."""
        if self._workspace is not None and self._search.wanted.pruned_by is not None and self._key:
            directory = snapshots_directory(self._search.root, self._search.wanted.pruned_by[0], self._key)
            Snapshots(directory, 1, process_seal(), open_shared(self._workspace.runtime.storage)).clear()


OnEvent = Callable[[TrialRun], None]
"""Called when a trial begins and ends."""


@flow(name="trial", flow_run_name="{search.name} {values}", task_runner=task_runner(), persist_result=False)
def _trial(subject: Subject, search: SearchConfig, values: dict[str, Any]) -> Any:
    """Run the graph of `subject` up to the stage `search.until`, without registration."""
    # Prefect pickles a flow with its tasks: it must not refer to the trial.
    try:
        subject.run(_lifecycle)
    except Exception as error:
        if not is_cancelled(error):
            raise
        return Cancelled(message="The search ended this trial early.")


def _lifecycle(config: LifecycleConfig) -> None:
    with open_workspace(config, Path()):
        lifecycle_graph(config)


def _key(workspace: Workspace, stage: str) -> str:
    """Key of a stage; empty until it is called and its parents are done."""
    call = workspace.calls.get(stage)
    if call is None or not all(h.call is None or workspace.has_ended(h.name) for h in call.parents.values()):
        return ""
    try:
        parents = {role: handle.result().sha256 for role, handle in call.parents.items()}
    except Exception:  # a parent failed, which the run reports
        return ""
    memory = DigestMemory(workspace.output / DIGESTS)
    return identify(call.kind, stage, call.config, call.seed, call.runtime, parents, call.functions, memory)[0].key


def _last_value(workspace: Workspace, field: str, stage: str, metric: str) -> float:
    """The last value of a metric. Raises UnknownMetricError if the stage does not log it."""
    call = workspace.calls[stage]
    metrics: dict[str, float] = Handle(workspace, stage, call.kind.output, call).result().metrics
    if metric not in metrics:
        known = ", ".join(sorted(metrics))
        raise UnknownMetricError(f"{field}: {metric!r} is not allowed: stage {stage!r} logs {known}")
    return metrics[metric]


def _log(trial: TrialRun) -> None:
    log.info("trial %d: %s", trial.number, trial.text)


@flow(name="tune", flow_run_name="{search.name} on {config.project}", task_runner=task_runner(), persist_result=False)
def tune(config: LifecycleConfig, search: SearchConfig, output: str = "runs/lifecycle") -> dict[str, Any]:
    """Search fields of `config` in the directory `output`; returns the content of results.json.

    Raises:
        ConfigError: the search does not fit the config, or its metric is never logged.
        RuntimeError: no trial finished.
    """
    return _tune(Subject(config=config), search, output, _log)


def tune_flow(on_event: OnEvent) -> Flow[..., dict[str, Any]]:
    """The flow `tune` over any subject. It is never deployed, since it imports the module that a subject names."""

    @flow(name="tune", flow_run_name="{search.name} on {subject.name}", task_runner=task_runner(), persist_result=False)
    def tune_subject(subject: Subject, search: SearchConfig, output: str) -> dict[str, Any]:
        """`tune` for a config or a flow."""
        return _tune(subject, search, output, on_event)

    return tune_subject


def _tune(subject: Subject, wanted: SearchConfig, output: str, on_event: OnEvent) -> dict[str, Any]:
    root = Path(output).absolute()
    search = Search(root, subject, wanted, search_space(subject, wanted))
    search.directory.mkdir(parents=True, exist_ok=True)
    prepare_deployment(root)
    graph = subject.recorded()
    check_run(graph, with_device(graph.runtime).device, nodes())
    before = search.directory / "flow_run"
    crash_lost_flow_run(before.read_text() if before.is_file() else None, flow_run.id)
    write_atomic(before, str(flow_run.id))
    run_search(search, on_event)
    results = report(search)
    create_markdown_artifact(results_markdown(results, wanted), key="search", description=f"{wanted.name}: {root}")
    if results["best"] is None:
        raise RuntimeError(f"no trial of {wanted.name} finished; the first: {results['trials'][0]['error']}")
    return results


def run_search(search: Search, on_event: OnEvent = _log, kind: type[TrialRun] = TrialRun) -> None:
    """Run the missing trials of a search, each as a `kind`. Raises like `tune`."""
    waiting, active = search.waiting(), dict[Future[float], TrialRun]()
    threads = ThreadPoolExecutor(search.wanted.concurrent)
    try:
        while True:
            for drawn in islice(waiting, search.wanted.concurrent - len(active)):
                trial = kind(search, drawn)
                on_event(trial)
                # In a copy of this thread's context, which holds Prefect's settings and this flow's run.
                active[threads.submit(copy_context().run, trial.measure)] = trial
            if not active:
                return
            done = wait(active, POLL_SECONDS, FIRST_COMPLETED).done
            for future, trial in list(active.items()):
                trial.report_points()
                if future in done:
                    del active[future]
                    trial.end(future)
                    on_event(trial)
    except BaseException:
        for trial in active.values():
            with contextlib.suppress(Exception):  # the first error says why
                trial.stop()
        wait(active, STOP_SECONDS * load())
        raise
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
