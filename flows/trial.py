"""One trial of a search: the graph with the trial's values, up to the measured stage, in a thread of its own."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import optuna
import ray
from optuna.trial import TrialState
from prefect import flow, tags as prefect_tags
from prefect.states import Cancelled

from xray.flows.lifecycle import open_workspace
from xray.flows.lifecycle_graph import lifecycle_graph
from xray.flows.search import SearchConfig
from xray.flows.study import ERROR, PLACE, VALUES, Search
from xray.flows.subject import Subject
from xray.tasks.command import Command, commanded
from xray.tasks.output_directory import CONFIG
from xray.tasks.task_runner import task_runner
from xray.tasks.workspace import Workspace
from xray_runtime.kernel.config.validation import ConfigError
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

VALUE = "search/value"
"""MLflow metric with the trial's value, for comparing trials in MLflow."""


class UnknownMetricError(ConfigError):
    """The search's metric is not logged, so no trial can finish."""


class TrialRun:
    """A running trial, with its record in Optuna."""

    def __init__(self, search: Search, trial: optuna.Trial) -> None:
        place, self.values = trial.user_attrs[PLACE], trial.user_attrs[VALUES]
        self.number = [known.user_attrs[PLACE] for known in search.trials()].index(place)
        self.has_ended, self.is_pruned = False, False
        self.text = ", ".join(f"{path} = {json.dumps(value)}" for path, value in self.values.items())
        """Its values; its outcome when it has ended."""
        self._study, self._trial, self._search, self._root = search.study, trial, search.wanted, search.root
        self._subject = search.subject.with_values(self.values)
        self._place = search.directory / "trials" / place
        self._place.mkdir(parents=True, exist_ok=True)
        self._workspace: Workspace | None = None
        self._key = ""
        """Key of the stage whose metric is compared; empty until its parents are done."""
        self._reported, self._is_stopping = 0, False

    @property
    def progress(self) -> Any:
        """The progress actor of its run; None before it begins."""
        return self._workspace.progress if self._workspace is not None else None

    def measure(self) -> float:
        """Run the trial; returns its value."""
        if self._subject.config is not None:
            write_atomic(self._place / CONFIG, resolved_yaml(self._subject.config))
        command = Command(
            output=str(self._root),
            until=self._search.until,
            on_open=self._opened,
            fields=self._subject.fields,
            place=self._place,
            tags={"xray.search": self._search.name, "xray.trial": json.dumps(self.values)},
        )
        with prefect_tags("xray", f"search:{self._search.name}"), commanded(command):
            state: Any = _trial(self._subject, self._search, self.values, return_state=True)
        if state.is_cancelled():
            raise RuntimeError("the trial's run was stopped")
        state.result()
        if self._workspace is None:
            raise ConfigError(f"{self._subject.name}: the flow must open a workspace")
        return self._measured(self._workspace)

    def points(self) -> Iterator[tuple[int, float]]:
        """(step, value) of the compared metric, as far as it is logged."""
        if self._workspace is None or self._search.pruned_by is None:
            return
        stage, metric = self._search.pruned_by
        self._key = self._key or _key(self._workspace, stage)
        if self._key:
            yield from read_metrics(records_directory(self._root, stage, self._key) / METRICS).get(metric, [])

    def stop(self) -> None:
        """Make the active stages write a last snapshot, and end."""
        self._is_stopping = True
        if self._workspace is not None:
            ray.get(self._workspace.progress.stop.remote())

    def follow(self) -> None:
        """Report new points of the compared metric, and stop the trial if it is worse than the others."""
        prune = self._search.prune
        sign = 1.0 if prune is None or prune.mode in (None, self._search.mode) else -1.0
        for step, value in self.points():
            if step >= self._reported and math.isfinite(value) and not self.is_pruned:
                self._reported = step + 1
                self._trial.report(sign * value, self._reported)
                if self._trial.should_prune():
                    self.is_pruned = True
                    self.stop()

    def end(self, outcome: Future[float]) -> None:
        """Record the outcome. Raises UnknownMetricError if no trial can finish."""
        self.has_ended, error = True, outcome.exception()
        if error is None:
            self.text = f"{self._search.metric} {outcome.result():.4g}"
            self._study.tell(self._trial, outcome.result())
        elif self.is_pruned:
            self.text = "pruned"
            self._drop_snapshots()
            self._study.tell(self._trial, state=TrialState.PRUNED)
        else:
            cause = root_cause(error)
            reason = f"{type(cause).__name__}: {error_summary(error)}"
            self.text = f"failed {reason}"
            self._trial.set_user_attr(ERROR, reason)
            self._study.tell(self._trial, state=TrialState.FAIL)
            if isinstance(cause, UnknownMetricError):
                raise cause from None

    def _drop_snapshots(self) -> None:
        """Delete the snapshots of the compared stage."""
        if self._workspace is not None and self._search.pruned_by is not None and self._key:
            directory = snapshots_directory(self._root, self._search.pruned_by[0], self._key)
            Snapshots(directory, 1, process_seal(), open_shared(self._workspace.runtime.storage)).clear()

    def _opened(self, workspace: Workspace) -> None:
        self._workspace = workspace
        if self._is_stopping:
            self.stop()

    def _measured(self, workspace: Workspace) -> float:
        """The value of the trial, which is also recorded in MLflow."""
        if self._search.pruned_by is not None:
            _last_value(workspace, "prune.metric", *self._search.pruned_by)
        value = _last_value(workspace, "metric", self._search.until, self._search.metric)
        if not math.isfinite(value):
            raise ValueError(f"{self._search.metric} is {value}")
        run = StageRun(workspace.run_record.tracker, workspace.context.run_id)
        run.metrics([(0, int(time.time() * 1000), {VALUE: value})])
        return value


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
