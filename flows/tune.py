"""The flows of `xray tune`: Optuna draws values, each trial runs in its own process, bad trials end early.

The trials' records are the whole state of a search. The next draw depends only on the seed, its number and these
records, so a search continues after it was killed, edited or extended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import optuna
import ray
from prefect import Flow, flow
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run

from xray.flows.lifecycle import prepare_deployment
from xray.flows.search import MAX_DRAWS, SearchConfig, search_space
from xray.flows.subject import Subject
from xray.flows.trial_process import TrialProcess, surroundings
from xray.flows.trials import (
    POLL_SECONDS,
    Points,
    Search,
    Trial,
    TrialRecord,
    UnknownMetricError,
    is_worse_than_median,
    stop_trials,
)
from xray.flows.tune_report import distributions, report, results_markdown, study_of
from xray.tasks.prefect_run import crash_lost_flow_run
from xray.tasks.preflight import check_run
from xray.tasks.task_runner import task_runner
from xray.tasks.workspace import STOP_SECONDS
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.errors import error_summary, root_cause
from xray_runtime.files import write_atomic
from xray_runtime.seeding import derive_seed
from xray_runtime.workers.nodes import nodes, same_node
from xray_runtime.workers.placement import with_device

log = logging.getLogger(__name__)

Event = tuple[Trial, TrialRecord]


@flow(name="tune", flow_run_name="{search.name} on {config.project}", task_runner=task_runner(), persist_result=False)
def tune(config: LifecycleConfig, search: SearchConfig, output: str = "runs/lifecycle") -> dict[str, Any]:
    """Search fields of `config` in the directory `output`; returns the content of results.json.

    Raises:
        ConfigError: the search does not fit the config, or its metric is never logged.
        RuntimeError: no trial finished.
    """
    return _tune(Subject(config=config), search, output, _log)


def tune_flow(on_event: Callable[[Event], None]) -> Flow[..., dict[str, Any]]:
    """The flow `tune` over any subject, which calls `on_event` when a trial begins and ends.

    It is never deployed, since it imports the module that a subject names.
    """

    @flow(name="tune", flow_run_name="{search.name} on {subject.name}", task_runner=task_runner(), persist_result=False)
    def tune_subject(subject: Subject, search: SearchConfig, output: str) -> dict[str, Any]:
        """`tune` for a config or a flow."""
        return _tune(subject, search, output, on_event)

    return tune_subject


def _tune(subject: Subject, search: SearchConfig, output: str, on_event: Callable[[Event], None]) -> dict[str, Any]:
    root = Path(output).absolute()
    current = Search(root, subject, search, search_space(subject, search))
    current.directory.mkdir(parents=True, exist_ok=True)
    prepare_deployment(root)
    graph = subject.recorded()
    check_run(graph, with_device(graph.runtime).device, nodes())
    before = current.directory / "flow_run"
    crash_lost_flow_run(before.read_text() if before.is_file() else None, flow_run.id)
    write_atomic(before, str(flow_run.id))
    trials = run_search(current, on_event=on_event)
    results = report(current, trials)
    create_markdown_artifact(results_markdown(results, search), key="search", description=f"{search.name}: {root}")
    if results["best"] is None:
        raise RuntimeError(f"no trial of {search.name} finished; the first: {trials[0][1].error}")
    return results


def _log(event: Event) -> None:
    log.info("trial %d %s: %s", event[1].number, event[1].values, event[1].state)


def run_search(
    search: Search, process: type[TrialProcess] = TrialProcess, on_event: Callable[[Event], None] = _log
) -> list[tuple[Trial, TrialRecord]]:
    """Run the missing trials of a search on Ray; returns all its trials in order. Raises like `tune`.

    Args:
        process: the actor class that runs a trial.
        on_event: called when a trial begins and ends.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    waiting, active = _next_trials(search), list[_Run]()
    # On this node, which has the output directory; two threads, to answer during a trial.
    actor = ray.remote(process).options(num_cpus=0, max_concurrency=2, scheduling_strategy=same_node())
    try:
        while True:
            for trial in islice(waiting, search.wanted.concurrent - len(active)):
                active.append(_Run(search, trial, actor.remote(trial, surroundings()), on_event))
            if not active:
                return search.records()
            ray.wait([run.outcome for run in active], timeout=POLL_SECONDS)
            for run in list(active):
                others = [other.points for other in active if other is not run]
                if run.has_ended(others):
                    active.remove(run)
    except BaseException:
        stop_trials(run.trial for run in active)
        for run in active:
            ray.kill(run.process)
        raise


def _next_trials(search: Search) -> Iterator[Trial]:
    """The interrupted and failed trials, then new ones, up to the search's number of trials."""
    own = [entry for entry in search.all_records() if entry[1].search == search.digest]
    unfinished = [trial for trial, record in own if record.state in ("running", "failed")]
    new = iter(lambda: _draw(search), None)
    yield from islice(chain(unfinished, new), max(search.wanted.trials - (len(own) - len(unfinished)), 0))


def _draw(search: Search) -> Trial | None:
    """A new trial; None if MAX_DRAWS draws found none.

    The draw depends on the seed, the number of the trial, and the ended trials.
    """
    study = study_of(search, [record for _, record in search.records() if record.state != "failed"])
    for attempt in range(MAX_DRAWS):
        seed = derive_seed(search.wanted.seed, "trial", search.next_number(), attempt)
        study.sampler = optuna.samplers.TPESampler(seed=seed)
        trial = search.trial(study.ask(distributions(search.space)).params)
        known = trial.record()
        if known is None or (known.state in ("running", "failed") and known.search != search.digest):
            return trial
    log.warning("%d draws found no values that have not been tried; the search ends", MAX_DRAWS)
    return None


@dataclass
class _Run:
    """A running trial with its actor and record."""

    search: Search
    trial: Trial
    process: Any
    on_event: Callable[[Event], None]
    points: Points = field(default_factory=list)

    def __post_init__(self) -> None:
        before = self.trial.record()
        number = before.number if before is not None else self.search.next_number()
        self._keep(TrialRecord(number=number, search=self.search.digest, values=self.trial.values, state="running"))
        self.outcome = self.process.measure.remote()

    def has_ended(self, others: list[Points]) -> bool:
        """Record new points; returns whether the trial has ended, or ends it if it is worse than the others."""
        try:
            ended, _ = ray.wait([self.outcome], timeout=0)
            for point in ray.get(self.process.reported.remote())[len(self.points) :]:
                self.points.append(point)
                known = [record.points for _, record in self.search.records() if record.state != "failed"]
                if is_worse_than_median(self.search.wanted, self.points, [*known, *others]):
                    self._keep(self._record(state="pruned"))
                    stop_trials([self.trial])
                    # The trial still deletes its snapshots.
                    ray.wait([self.outcome], timeout=STOP_SECONDS)
                    return True
            if ended:
                self._keep(self._record(state="finished", value=ray.get(self.outcome)))
            return bool(ended)
        except Exception as error:
            cause = root_cause(error)
            self._keep(self._record(state="failed", error=f"{type(cause).__name__}: {error_summary(error)}"))
            if isinstance(cause, UnknownMetricError):
                raise cause from None
            return True

    def _record(self, **outcome: Any) -> TrialRecord:
        return self.record.model_copy(
            update={"points": self.points, "run_id": self.trial.run().get("run_id")} | outcome
        )

    def _keep(self, record: TrialRecord) -> None:
        self.record = record
        self.trial.keep(record)
        self.on_event((self.trial, record))
