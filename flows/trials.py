"""One trial of a search: a lifecycle of its own in the search's output directory, and how it came out.

A trial lies under the digest of its config and of what is measured, so the same trial is never run twice: a search that
is started again hears of its finished trials what they reported then, and goes on where it was cut.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from prefect import flow, tags as prefect_tags
from prefect.states import Cancelled
from prefect_ray import RayTaskRunner
from pydantic import BaseModel, ConfigDict, ValidationError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from xray.flows.lifecycle import recorded, run_stages
from xray.flows.search import SearchConfig, plans_until, trial_digest, with_values
from xray.tasks.output_directory import CONFIG, LIFECYCLE_LOCK, file_lock
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.loading import load_config
from xray_runtime.errors import is_cancelled
from xray_runtime.files import write_atomic
from xray_runtime.processes import QUIET, redirect_output
from xray_runtime.progress import open_progress
from xray_runtime.report.figures import read_metrics
from xray_runtime.store.identity import stage_key
from xray_runtime.tracking.mlflow_tracker import StageRun
from xray_runtime.tracking.recorder import records_directory, snapshots_directory
from xray_runtime.workers.placement import resolve_layouts
from xray_runtime.workers.pool import open_worker_pool

State = Literal["finished", "pruned", "failed"]
Points = list[tuple[int, float]]
RUNNER, NAMESPACE = "xray-trials", "xray"
RECORD = "trial.json"
VALUE = "search/value"
"""Metric of a trial's run in MLflow, by which trials can be compared there."""


class TrialRecord(BaseModel):
    """How a trial came out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    values: dict[str, Any]
    state: State
    value: float | None
    points: Points
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

    @property
    def place(self) -> Path:
        """Directory of its config, journal and record."""
        digest = trial_digest(self.config, self.values, self.search)
        return search_directory(self.root, self.search.name) / "trials" / digest[:12]

    def record(self) -> TrialRecord | None:
        """What was recorded of it; None where it did not end, or failed: a failed trial is tried again."""
        try:
            record = TrialRecord.model_validate_json((self.place / RECORD).read_bytes())
        except (OSError, ValidationError):
            return None
        return record if record.state != "failed" else None

    def series(self, stage: str) -> dict[str, Points]:
        """What `stage` has logged so far: metric → (step, value) points."""
        directory = self._directory(records_directory, stage)
        return read_metrics(directory / "metrics.jsonl") if directory is not None else {}

    def points(self) -> Points:
        """What pruning watches, so far, by the number of steps done."""
        if self.search.watched is None:
            return []
        stage, metric = self.search.watched
        points = self.series(stage).get(metric, [])
        return [(step + 1, value) for step, value in points if math.isfinite(value)]

    def drop_snapshots(self) -> None:
        """Remove what a trial that was pruned would have gone on from."""
        for plan in plans_until(self.config, self.search.until):
            directory = self._directory(snapshots_directory, plan.name)
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)

    def run_id(self) -> str | None:
        content = _journal(self.place)
        return content["run_id"] if content is not None else None

    def _directory(self, kind: Any, stage: str) -> Path | None:
        """The directory of this kind of `stage`; None until all stages it builds on are done."""
        content = _journal(self.place)
        if content is None:
            return None
        done = {entry["name"]: entry["checkpoint"]["sha256"] for entry in content["stages"]}
        plans = plans_until(load_config(self.place / CONFIG), stage)
        if not set(plans[-1].parents.values()) <= set(done):
            return None
        parents = {role: done[name] for role, name in plans[-1].parents.items()}
        key = stage_key(stage=stage, kind=plans[-1].kind, sections=plans[-1].sections, parents=parents)
        directory: Path = kind(self.root, stage, key)
        return directory


def search_directory(root: Path, name: str) -> Path:
    """Where the search `name` keeps its trials and results."""
    return root / "searches" / name


def start_runner() -> Any:
    """The process that runs trials, on this node: its output lies there, and whatever ends the search ends it too."""
    here = ray.get_runtime_context().get_node_id()
    options: dict[str, Any] = {
        "name": RUNNER,
        "namespace": NAMESPACE,
        "num_cpus": 0,
        "max_restarts": -1,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False),
    }
    if os.environ.get("RAY_ADDRESS"):
        # A Ray that was there before does not hand on what this process has in its environment.
        names = ("PREFECT_", "MLFLOW_", "XRAY_")
        variables = QUIET | {name: value for name, value in os.environ.items() if name.startswith(names)}
        options["runtime_env"] = {"env_vars": variables}
    return ray.remote(TrialRunner).options(**options).remote()


class TrialRunner:
    """Runs trials one after the other; Workhorses wait from one trial to the next."""

    def __init__(self) -> None:
        self._stable, self._board = open_worker_pool(), open_progress()

    def run(self, trial: Trial) -> bool:
        """Run `trial`; returns whether it came to its end, or was stopped. Raises what its lifecycle failed of."""
        redirect_output(trial.root / "logs" / "trials.log")
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        ray.get(self._board.begin.remote())
        place = trial.place
        place.mkdir(parents=True, exist_ok=True)
        with prefect_tags("xray", f"search:{trial.search.name}"):
            config = with_values(trial.config, trial.values)
            state: Any = run_trial(config, trial.search, trial.values, str(trial.root), str(place), return_state=True)
        if state.is_cancelled():
            return False
        state.result()
        return True

    def idle(self) -> None:
        """Answers as soon as no trial is at work."""


@flow(
    name="trial",
    flow_run_name="{search.name} {values}",
    task_runner=RayTaskRunner(init_kwargs={"log_to_driver": False, "logging_level": "ERROR"}),
    persist_result=False,
)
def run_trial(config: LifecycleConfig, search: SearchConfig, values: dict[str, Any], output: str, place: str) -> Any:
    """A lifecycle up to the stage `search.until`, without registration; its records lie in `place`."""
    root = Path(output)
    config, _ = resolve_layouts(config)
    plans = plans_until(config, search.until)
    tags = {"xray.search": search.name, "xray.trial": json.dumps(values)}
    try:
        with file_lock(root, LIFECYCLE_LOCK), recorded(config, root, Path(place), tags) as (tracker, context, summary):
            done = run_stages(plans, config, tracker, context, summary)
            last = done[search.until]
            value = read_metrics(records_directory(root, last.name, last.key) / "metrics.jsonl").get(search.metric)
            if value:
                point = (value[-1][0], int(time.time() * 1000), {VALUE: value[-1][1]})
                StageRun(tracker, context.parent_run_id).metrics([point])
            summary.ended(done["evaluate"].checkpoint.path if "evaluate" in done else None)
            tracker.log_files(context.parent_run_id, summary.path)
    except Exception as error:
        if not is_cancelled(error):
            raise
        return Cancelled(message="The search ended it early.")
    return None


def write_record(trial: Trial, record: TrialRecord) -> None:
    trial.place.mkdir(parents=True, exist_ok=True)
    write_atomic(trial.place / RECORD, record.model_dump_json(indent=2))


def _journal(place: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads((place / "lifecycle.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content
