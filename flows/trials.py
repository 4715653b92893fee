"""One trial of a search: a lifecycle of its own in the search's output directory, and how it came out.

A trial lies under the digest of its config and of what is measured, so the same trial is never run twice.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import ray
from prefect import Flow, flow, tags as prefect_tags
from prefect.context import hydrated_context, serialize_context
from prefect.states import Cancelled
from pydantic import BaseModel, ConfigDict, ValidationError

from xray.flows.lifecycle import open_workspace
from xray.flows.lifecycle_graph import lifecycle_graph
from xray.flows.search import SearchConfig, Space, search_digest, trial_digest, with_values
from xray.tasks.output_directory import CONFIG, DIGESTS
from xray.tasks.spec import forwarded_variables
from xray.tasks.task_runner import task_runner
from xray.tasks.workspace import STOP_SECONDS, Workspace
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.loading import resolved_yaml
from xray_runtime.config.validation import ConfigError
from xray_runtime.cores import load
from xray_runtime.credentials import tracking_address
from xray_runtime.errors import is_cancelled
from xray_runtime.files import write_atomic
from xray_runtime.graph.handles import Handle
from xray_runtime.graph.stage_identity import identify
from xray_runtime.lineage.log import LIFECYCLE
from xray_runtime.processes import redirect_output
from xray_runtime.report.figures import read_metrics
from xray_runtime.store.digest_memory import DigestMemory
from xray_runtime.store.seal import process_seal
from xray_runtime.store.shared import open_shared
from xray_runtime.store.snapshots import Snapshots
from xray_runtime.tracking.mlflow_tracker import StageRun
from xray_runtime.tracking.recorder import METRICS, records_directory, snapshots_directory
from xray_runtime.workers.placement import resolve_layouts
from xray_runtime.workers.progress import find_progress

State = Literal["running", "finished", "pruned", "failed"]
Points = list[tuple[int, float]]
RECORD = "trial.json"
VALUE = "search/value"
"""Metric of a trial's run in MLflow, by which trials can be compared there."""
POLL_SECONDS = 0.5


class UnknownMetricError(ConfigError):
    """What the search measures is not logged: no trial can come out."""


class TrialRecord(BaseModel):
    """How a trial came out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    search: str
    """Digest of the search it was drawn in first."""
    values: dict[str, Any]
    state: State
    value: float | None = None
    points: Points = []
    """(steps done, value) of what pruning watches."""
    error: str | None = None
    run_id: str | None = None
    """Its run in MLflow."""


@dataclass(frozen=True)
class Trial:
    """A trial of `search` over `config`, with `values` at the paths that are searched."""

    root: Path
    config: LifecycleConfig
    search: SearchConfig
    values: dict[str, Any]

    @cached_property
    def place(self) -> Path:
        """Directory of its config, its lifecycle.json and its record."""
        digest = trial_digest(self.config, self.values, self.search)
        return search_directory(self.root, self.search.name) / "trials" / digest[:12]

    def record(self) -> TrialRecord | None:
        return _read_record(self.place / RECORD)

    def keep(self, record: TrialRecord) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        write_atomic(self.place / RECORD, record.model_dump_json(indent=2))

    def run(self) -> dict[str, Any]:
        """Its lifecycle.json; empty where it has not begun."""
        try:
            content: dict[str, Any] = json.loads((self.place / LIFECYCLE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content

    def progress(self) -> Any:
        """The progress actor of its run; None where it is not at work."""
        run = self.run()
        return find_progress(run["run_id"]) if run.get("status") == "running" else None


def stop_trials(trials: Iterable[Trial]) -> None:
    """Have trials at work make a last snapshot, and wait for it."""
    working = [(trial, progress) for trial in trials if (progress := trial.progress()) is not None]
    for _, progress in working:
        ray.get(progress.stop.remote())
    deadline = time.monotonic() + STOP_SECONDS * load()
    while any(trial.run()["status"] == "running" for trial, _ in working) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


@dataclass(frozen=True)
class Search:
    """A search over `config` in the output directory `root`, and what is known of its trials."""

    root: Path
    config: LifecycleConfig
    wanted: SearchConfig
    space: Space

    @property
    def directory(self) -> Path:
        return search_directory(self.root, self.wanted.name)

    @cached_property
    def digest(self) -> str:
        return search_digest(self.config, self.wanted)

    def trial(self, drawn: Mapping[str, Any]) -> Trial:
        """The trial of what the searcher drew: of choices it draws the index."""
        space = self.space.items()
        values = {path: found[drawn[path]] if isinstance(found, list) else drawn[path] for path, found in space}
        return Trial(self.root, self.config, self.wanted, values)

    def drawn(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What the searcher would have drawn."""
        space = self.space.items()
        return {path: found.index(values[path]) if isinstance(found, list) else values[path] for path, found in space}

    def records(self) -> list[tuple[Trial, TrialRecord]]:
        """The trials that fit this search and are not at work, in their order; also those of it as it was before."""
        return [entry for entry in self.all_records() if entry[1].state != "running"]

    def all_records(self) -> list[tuple[Trial, TrialRecord]]:
        """As `records`, with those at work or cut short."""
        found = []
        for path in (self.directory / "trials").glob(f"*/{RECORD}"):
            record = _read_record(path)
            if record is None or record.values.keys() != self.space.keys():
                continue
            trial = Trial(self.root, self.config, self.wanted, record.values)
            if trial.place == path.parent and all(record.values[name] in self.space[name] for name in self.space):
                found.append((trial, record))
        return sorted(found, key=lambda entry: entry[1].number)

    def next_number(self) -> int:
        paths = (self.directory / "trials").glob(f"*/{RECORD}")
        return 1 + max((record.number for path in paths if (record := _read_record(path)) is not None), default=-1)


def is_worse_than_median(search: SearchConfig, points: Points, others: Iterable[Points]) -> bool:
    """Whether a trial's best value is worse than the median of the others' means up to the same step (Golovin et al.
    2017, Google Vizier), as `search.prune` has it."""
    prune = search.prune
    if prune is None or points[-1][0] < prune.after_steps:
        return False
    step = points[-1][0]
    # From `after_steps` on, and only where a trial has come as far.
    counted = [
        [v for s, v in other if prune.after_steps <= s <= step] for other in others if other and other[-1][0] >= step
    ]
    means = [fmean(values) for values in counted if values]
    values = [value for _, value in points]
    if len(means) < prune.min_trials:
        return False
    if (prune.mode or search.mode) == "max":
        return max(values) < median(means)
    return min(values) > median(means)


def search_directory(root: Path, name: str) -> Path:
    """Where the search `name` keeps its trials and results."""
    return root / "searches" / name


def _read_record(path: Path) -> TrialRecord | None:
    try:
        return TrialRecord.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def surroundings() -> dict[str, Any]:
    """What the process of a trial takes over from that of the search, also on a cluster that another started."""
    return {
        "settings": serialize_context()["settings_context"],
        "tracking_uri": tracking_address(),
        "variables": forwarded_variables(),
        "path": [path for path in sys.path if "site-packages" not in path],
    }


Report = Callable[[tuple[int, float]], None]
"""Takes the points that pruning watches."""


class LifecycleTrial:
    """A trial at work, in an actor of its own."""

    def __init__(self, trial: Trial, here: dict[str, Any]) -> None:
        self.trial, self._here = trial, here
        self.points: Points = []

    def reported(self) -> Points:
        """What pruning watches, so far."""
        return list(self.points)

    def measure(self) -> float:
        """Run the trial; returns its value."""
        here, trial = self._here, self.trial
        os.environ |= {name: value.get_secret_value() for name, value in here["variables"].items()}
        sys.path += [path for path in here["path"] if path not in sys.path]
        redirect_output(trial.place / "trial.log")
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        settings = hydrated_context({"settings_context": here["settings"]})
        with settings, prefect_tags("xray", f"search:{trial.search.name}"):
            config = with_values(trial.config, trial.values)
            where = (str(trial.root), str(trial.place), here["tracking_uri"])
            run = trial_flow(self.points.append)
            state: Any = run(config, trial.search, trial.values, *where, return_state=True)
            if state.is_cancelled():
                raise RuntimeError("its lifecycle was stopped")
            value: float = state.result()
        return value


def trial_flow(report: Report) -> Flow[..., Any]:
    """The flow of one trial, which reports the points that pruning watches."""

    @flow(name="trial", flow_run_name="{search.name} {values}", task_runner=task_runner(), persist_result=False)
    def run_trial(
        config: LifecycleConfig,
        search: SearchConfig,
        values: dict[str, Any],
        output: str,
        place: str,
        tracking_uri: str | None,
    ) -> Any:
        """A lifecycle up to the stage `search.until`, without registration; its records lie in `place`.

        Returns the trial's value.
        """
        return _run_trial(config, search, values, output, place, tracking_uri, report)

    return run_trial


def _run_trial(
    config: LifecycleConfig,
    search: SearchConfig,
    values: dict[str, Any],
    output: str,
    place: str,
    tracking_uri: str | None,
    report: Report,
) -> Any:
    config, _ = resolve_layouts(config)
    write_atomic(Path(place) / CONFIG, resolved_yaml(config))
    tags = {"xray.search": search.name, "xray.trial": json.dumps(values)}
    options: dict[str, Any] = {"place": Path(place), "tags": tags, "tracking_uri": tracking_uri}
    key = ""
    try:
        with open_workspace(config, Path(output), until=search.until, **options) as workspace:
            lifecycle_graph(config)
            if search.watched is not None:
                key = _key(workspace, search.watched[0])
                _follow(workspace, key, *search.watched, report)
    except Exception as error:
        if not is_cancelled(error):
            raise
        record = _read_record(Path(place) / RECORD)
        if key and search.watched is not None and record is not None and record.state == "pruned":
            directory = snapshots_directory(workspace.output, search.watched[0], key)
            Snapshots(directory, 1, process_seal(), open_shared(config.runtime.storage)).clear()
        return Cancelled(message="The search ended it early.")
    if search.watched is not None:
        _value(workspace, "prune.metric", *search.watched)
    value = _value(workspace, "metric", search.until, search.metric)
    if not math.isfinite(value):
        raise ValueError(f"{search.metric} is {value}")
    StageRun(workspace.run_record.tracker, workspace.context.run_id).metrics(
        [(0, int(time.time() * 1000), {VALUE: value})]
    )
    return value


def _handle(workspace: Workspace, stage: str) -> Handle:
    call = workspace.calls[stage]
    return Handle(workspace, stage, call.kind.output, call)


def _key(workspace: Workspace, stage: str) -> str:
    """Key of a stage, as soon as what it takes from is done."""
    call = workspace.calls[stage]
    parents = {role: handle.result().sha256 for role, handle in call.parents.items()}
    memory = DigestMemory(workspace.output / DIGESTS)
    runtime = workspace.runtime
    return identify(call.kind, stage, call.config, call.seed, runtime, parents, call.functions, memory)[0].key


def _follow(workspace: Workspace, key: str, stage: str, metric: str, report: Report) -> None:
    """Report each point of `metric` until the stage has ended."""
    path = records_directory(workspace.output, stage, key) / METRICS
    ended, done = False, 0
    while not ended:
        ended = workspace.has_ended(stage)
        for step, value in read_metrics(path).get(metric, []):
            if step >= done and math.isfinite(value):
                done = step + 1
                report((done, value))
        time.sleep(POLL_SECONDS)


def _value(workspace: Workspace, field: str, stage: str, metric: str) -> float:
    """The last value of a metric. Raises UnknownMetricError."""
    metrics: dict[str, float] = _handle(workspace, stage).result().metrics
    if metric not in metrics:
        known = ", ".join(sorted(metrics))
        raise UnknownMetricError(f"{field}: {metric!r} is not allowed: stage {stage!r} logs {known}")
    return metrics[metric]
