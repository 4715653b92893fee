"""One trial in its own process: the graph with the trial's values, up to the measured stage."""

from __future__ import annotations

import contextvars
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import Flow, flow, tags as prefect_tags
from prefect.context import hydrated_context, serialize_context
from prefect.states import Cancelled

from xray.flows.lifecycle import open_workspace
from xray.flows.lifecycle_graph import lifecycle_graph
from xray.flows.search import SearchConfig
from xray.flows.subject import Subject
from xray.flows.trials import POLL_SECONDS, RECORD, Points, Trial, UnknownMetricError, read_record
from xray.tasks.command import Command, commanded
from xray.tasks.output_directory import CONFIG
from xray.tasks.spec import forwarded_variables
from xray.tasks.task_runner import task_runner
from xray.tasks.workspace import Workspace
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.loading import resolved_yaml
from xray_runtime.config.validation import ConfigError
from xray_runtime.credentials import tracking_address
from xray_runtime.errors import is_cancelled
from xray_runtime.files import write_atomic
from xray_runtime.graph.handles import Handle
from xray_runtime.graph.stage_identity import identify
from xray_runtime.processes import redirect_output
from xray_runtime.report.figures import read_metrics
from xray_runtime.store.digest_memory import DIGESTS, DigestMemory
from xray_runtime.store.seal import process_seal
from xray_runtime.store.shared import open_shared
from xray_runtime.store.snapshots import Snapshots
from xray_runtime.tracking.mlflow_tracker import StageRun
from xray_runtime.tracking.recorder import METRICS, records_directory, snapshots_directory

VALUE = "search/value"
"""MLflow metric with the trial's value, for comparing trials in MLflow."""

Report = Callable[[tuple[int, float]], None]
"""Receives (steps done, value) points for pruning."""


def surroundings() -> dict[str, Any]:
    """Settings and environment that a trial's process needs from the search's process."""
    return {
        "settings": serialize_context()["settings_context"],
        "tracking_uri": tracking_address(),
        "variables": forwarded_variables(),
        "path": [path for path in sys.path if "site-packages" not in path],
    }


class TrialProcess:
    """A trial in its own actor."""

    def __init__(self, trial: Trial, surroundings: dict[str, Any]) -> None:
        self.trial, self._surroundings = trial, surroundings
        self.points: Points = []

    def reported(self) -> Points:
        """The points for pruning so far."""
        return list(self.points)

    def measure(self) -> float:
        """Run the trial; returns its value."""
        given, trial = self._surroundings, self.trial
        os.environ |= {name: value.get_secret_value() for name, value in given["variables"].items()}
        sys.path += [path for path in given["path"] if path not in sys.path]
        redirect_output(trial.place / "trial.log")
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        settings = hydrated_context({"settings_context": given["settings"]})
        with settings, prefect_tags("xray", f"search:{trial.search.name}"):
            subject = trial.subject.with_values(trial.values)
            where = (str(trial.root), str(trial.place), given["tracking_uri"])
            run = trial_flow(self.points.append)
            state: Any = run(subject, trial.search, trial.values, *where, return_state=True)
            if state.is_cancelled():
                raise RuntimeError("the trial's run was stopped")
            value: float = state.result()
        return value


def trial_flow(report: Report) -> Flow[..., Any]:
    """The flow of one trial, which reports points for pruning."""

    @flow(name="trial", flow_run_name="{search.name} {values}", task_runner=task_runner(), persist_result=False)
    def run_trial(
        subject: Subject,
        search: SearchConfig,
        values: dict[str, Any],
        output: str,
        place: str,
        tracking_uri: str | None,
    ) -> Any:
        """Run the graph of `subject` up to the stage `search.until`, without registration; its records are in `place`.

        Returns the trial's value.
        """
        if subject.config is not None:
            write_atomic(Path(place) / CONFIG, resolved_yaml(subject.config))
        follower = _Follower(search.pruned_by, report)
        command = Command(
            output=output,
            until=search.until,
            on_open=follower.opened,
            fields=subject.fields,
            place=Path(place),
            tags={"xray.search": search.name, "xray.trial": json.dumps(values)},
            tracking_uri=tracking_uri,
        )
        try:
            with commanded(command):
                subject.run(_lifecycle)
        except Exception as error:
            if not is_cancelled(error):
                raise
            record = read_record(Path(place) / RECORD)
            if record is not None and record.state == "pruned":
                follower.drop_snapshots()
            return Cancelled(message="The search ended this trial early.")
        finally:
            follower.end()
        if follower.workspace is None:
            raise ConfigError(f"{subject.name}: the flow must open a workspace")
        return _measured(follower.workspace, search)

    return run_trial


def _measured(workspace: Workspace, search: SearchConfig) -> float:
    """The value of a trial that has ended, which is also recorded in MLflow."""
    if search.pruned_by is not None:
        _value(workspace, "prune.metric", *search.pruned_by)
    value = _value(workspace, "metric", search.until, search.metric)
    if not math.isfinite(value):
        raise ValueError(f"{search.metric} is {value}")
    StageRun(workspace.run_record.tracker, workspace.context.run_id).metrics(
        [(0, int(time.time() * 1000), {VALUE: value})]
    )
    return value


def _lifecycle(config: LifecycleConfig) -> None:
    with open_workspace(config, Path()):
        lifecycle_graph(config)


class _Follower:
    """Follows the workspace of a trial and reports one stage's metric for pruning as it is logged."""

    def __init__(self, target: tuple[str, str] | None, report: Report) -> None:
        self.workspace: Workspace | None = None
        self._target, self._report, self._key = target, report, ""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def opened(self, workspace: Workspace) -> None:
        self.workspace = workspace
        if self._target is not None:
            # A copy of this thread's context, which holds Prefect's settings.
            follow = contextvars.copy_context().run
            self._thread = threading.Thread(target=follow, args=(self._follow, workspace, *self._target), daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Report the last points after the run has ended."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def drop_snapshots(self) -> None:
        """Delete the snapshots of the followed stage."""
        if self.workspace is not None and self._target is not None and self._key:
            directory = snapshots_directory(self.workspace.output, self._target[0], self._key)
            Snapshots(directory, 1, process_seal(), open_shared(self.workspace.runtime.storage)).clear()

    def _follow(self, workspace: Workspace, stage: str, metric: str) -> None:
        """Report each point of `metric` until the run has ended."""
        ended, done = False, 0
        while not ended:
            ended = self._ended.wait(POLL_SECONDS)
            self._key = self._key or _key(workspace, stage)
            path = records_directory(workspace.output, stage, self._key) / METRICS
            for step, value in read_metrics(path).get(metric, []) if self._key else ():
                if step >= done and math.isfinite(value):
                    done = step + 1
                    self._report((done, value))


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


def _value(workspace: Workspace, field: str, stage: str, metric: str) -> float:
    """The last value of a metric. Raises UnknownMetricError if the stage does not log it."""
    call = workspace.calls[stage]
    metrics: dict[str, float] = Handle(workspace, stage, call.kind.output, call).result().metrics
    if metric not in metrics:
        known = ", ".join(sorted(metrics))
        raise UnknownMetricError(f"{field}: {metric!r} is not allowed: stage {stage!r} logs {known}")
    return metrics[metric]
