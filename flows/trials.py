"""The trials of a search: each is a run in the search's output directory, with a record of its outcome.

A trial's directory is named after the digest of its subject and metric, so the same trial never runs twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import ray
from pydantic import BaseModel, ConfigDict, ValidationError

from xray.flows.search import SearchConfig, Space, search_digest, trial_digest
from xray.flows.subject import Subject
from xray.tasks.workspace import STOP_SECONDS
from xray_runtime.config.validation import ConfigError
from xray_runtime.cores import load
from xray_runtime.evidence.log import read_run
from xray_runtime.files import write_atomic
from xray_runtime.workers.progress import find_progress

State = Literal["running", "finished", "pruned", "failed"]
Points = list[tuple[int, float]]
RECORD = "trial.json"
POLL_SECONDS = 0.5


class UnknownMetricError(ConfigError):
    """The search's metric is not logged, so no trial can finish."""


class TrialRecord(BaseModel):
    """The outcome of a trial."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    search: str
    """Digest of the search that drew it first."""
    values: dict[str, Any]
    state: State
    value: float | None = None
    points: Points = []
    """(steps done, value) of the metric for pruning."""
    error: str | None = None
    run_id: str | None = None
    """Its run in MLflow."""


@dataclass(frozen=True)
class Trial:
    """A trial of `search` over `subject`, with `values` at the search's paths."""

    root: Path
    subject: Subject
    search: SearchConfig
    values: dict[str, Any]

    @cached_property
    def place(self) -> Path:
        """Directory of its config, its lifecycle.json and its record."""
        digest = trial_digest(self.subject, self.values, self.search)
        return search_directory(self.root, self.search.name) / "trials" / digest[:12]

    def record(self) -> TrialRecord | None:
        return read_record(self.place / RECORD)

    def keep(self, record: TrialRecord) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        write_atomic(self.place / RECORD, record.model_dump_json(indent=2))

    def run(self) -> dict[str, Any]:
        """Content of its lifecycle.json; empty if the trial has not begun."""
        return read_run(self.place)

    def progress(self) -> Any:
        """The progress actor of its run; None if it is not running."""
        run = self.run()
        return find_progress(run["run_id"]) if run.get("status") == "running" else None


def stop_trials(trials: Iterable[Trial]) -> None:
    """Make running trials write a last snapshot, and wait for it."""
    working = [(trial, progress) for trial in trials if (progress := trial.progress()) is not None]
    for _, progress in working:
        ray.get(progress.stop.remote())
    deadline = time.monotonic() + STOP_SECONDS * load()
    while any(trial.run()["status"] == "running" for trial, _ in working) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


@dataclass(frozen=True)
class Search:
    """A search over `subject` in the output directory `root`, with the records of its trials."""

    root: Path
    subject: Subject
    wanted: SearchConfig
    space: Space

    @property
    def directory(self) -> Path:
        return search_directory(self.root, self.wanted.name)

    @cached_property
    def digest(self) -> str:
        return search_digest(self.subject, self.wanted)

    def trial(self, drawn: Mapping[str, Any]) -> Trial:
        """The trial of a draw; for choices, the draw is an index."""
        space = self.space.items()
        values = {path: found[drawn[path]] if isinstance(found, list) else drawn[path] for path, found in space}
        return Trial(self.root, self.subject, self.wanted, values)

    def drawn(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of `trial`: the draw that gives `values`."""
        space = self.space.items()
        return {path: found.index(values[path]) if isinstance(found, list) else values[path] for path, found in space}

    def records(self) -> list[tuple[Trial, TrialRecord]]:
        """The ended trials whose values are in the search's space, in order, including those of earlier versions."""
        return [entry for entry in self.all_records() if entry[1].state != "running"]

    def all_records(self) -> list[tuple[Trial, TrialRecord]]:
        """`records` with running and interrupted trials."""
        found = []
        for path in (self.directory / "trials").glob(f"*/{RECORD}"):
            record = read_record(path)
            if record is None or record.values.keys() != self.space.keys():
                continue
            trial = Trial(self.root, self.subject, self.wanted, record.values)
            if trial.place == path.parent and all(record.values[name] in self.space[name] for name in self.space):
                found.append((trial, record))
        return sorted(found, key=lambda entry: entry[1].number)

    def next_number(self) -> int:
        paths = (self.directory / "trials").glob(f"*/{RECORD}")
        return 1 + max((record.number for path in paths if (record := read_record(path)) is not None), default=-1)


def is_worse_than_median(search: SearchConfig, points: Points, others: Iterable[Points]) -> bool:
    """Whether a trial's best value is worse than the median of other trials' means up to its step (`PruneConfig`)."""
    prune = search.prune
    if prune is None or points[-1][0] < prune.after_steps:
        return False
    step = points[-1][0]
    # Only values from `after_steps` on count, and only trials that have reached this step.
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
    """Directory of the trials and results of the search `name`."""
    return root / "searches" / name


def read_record(path: Path) -> TrialRecord | None:
    """The record at `path`; None if it is missing or unreadable."""
    try:
        return TrialRecord.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
