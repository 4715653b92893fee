"""The flow behind `xray tune`: Ray Tune asks Optuna for values, a trial is a lifecycle, bad ones are ended early.

Every stage that an earlier trial has computed is there. A search that was killed is restored by Ray Tune; one that was
edited, or wants more trials, begins with what is known of the trials there were.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

# What Ray Tune reads when it is imported or at work: no reporters, no handler of its own for Ctrl-C; metrics come when
# they come; paths in a config are relative to where the search was started; little is lost when it is killed.
os.environ |= {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
}

import optuna
import ray
from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run
from ray import tune as ray_tune
from ray.tune.schedulers import FIFOScheduler, MedianStoppingRule
from ray.tune.search.optuna import OptunaSearch

from xray.flows.lifecycle import prepare_deployment
from xray.flows.search import SearchConfig, search_space
from xray.flows.trials import (
    LifecycleTrial,
    Points,
    Search,
    Trial,
    TrialRecord,
    UnknownMetricError,
    stop_trials,
    surroundings,
)
from xray.flows.tune_report import distributions, report, results_markdown
from xray.tasks.prefect_state import crash_lost_flow_run
from xray.tasks.task_runner import task_runner
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.loading import check_storage
from xray_runtime.errors import error_summary, root_cause
from xray_runtime.files import write_atomic
from xray_runtime.store.identity import digest

log = logging.getLogger(__name__)

Event = tuple[Trial, TrialRecord]
watch_here: ContextVar[Callable[[Event], None]] = ContextVar("watch_here")
"""Who is told when a trial begins and ends."""


@flow(name="tune", flow_run_name="{search.name} on {config.project}", task_runner=task_runner(), persist_result=False)
def tune(config: LifecycleConfig, search: SearchConfig, output: str = "runs/lifecycle") -> dict[str, Any]:
    """Search fields of `config` in the directory `output`; returns what `results.json` says.

    Raises:
        ConfigError: the search does not fit the config, or its metric is never logged.
        RuntimeError: no trial finished.
    """
    root = Path(output).absolute()
    at_hand = Search(root, config, search, search_space(config, search))
    at_hand.directory.mkdir(parents=True, exist_ok=True)
    prepare_deployment(root)
    check_storage(config)
    before = at_hand.directory / "flow_run"
    crash_lost_flow_run(before.read_text() if before.is_file() else None, flow_run.id)
    write_atomic(before, str(flow_run.id))
    trials = run_search(at_hand)
    results = report(at_hand, trials)
    create_markdown_artifact(results_markdown(results, search), key="search", description=f"{search.name}: {root}")
    if results["best"] is None:
        raise RuntimeError(f"no trial of {search.name} finished; the first: {trials[0][1].error}")
    return results


def run_search(search: Search, trainable: type[LifecycleTrial] = LifecycleTrial) -> list[tuple[Trial, TrialRecord]]:
    """Run what of the search has not been run, on Ray; returns all its trials in their order. Raises as `tune`."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    keeper = _Keeper(search)
    _keeper.set(keeper)
    try:
        _fit(search, keeper, trainable)
    except Exception:
        # Ray Tune makes text of what a callback raises.
        if keeper.wrong is not None:
            raise keeper.wrong from None
        raise
    except BaseException:
        stop_trials(keeper.at_work.values())
        raise
    return search.records()


def _fit(search: Search, keeper: _Keeper, trainable: type[LifecycleTrial]) -> None:
    wanted, here = search.wanted, f"node:{ray.util.get_node_ip_address()}"
    # On this node, whose disk the output is on; so many at a time, those too that are tried again.
    resources = ray_tune.PlacementGroupFactory([{"CPU": 0, here: int(10_000 / wanted.concurrent) / 10_000}])
    made = ray_tune.with_resources(ray_tune.with_parameters(trainable, search=search, here=surroundings()), resources)
    experiments, same = search.directory / "ray", digest([search.digest, wanted.trials, wanted.concurrent, here])[:12]
    for place in list(experiments.glob(f"{same}-*")):
        if any(place.glob("experiment_state-*.json")):
            tuner = ray_tune.Tuner.restore(str(place), made, resume_unfinished=True, restart_errored=True)
            if len(tuner.fit()) == int(place.name.rsplit("-", 1)[1]):
                return
        # It was killed before all was on record.
        log.warning("%s cannot be restored; the search starts over with the trials that have ended", place)
        shutil.rmtree(place)
    known = [entry for entry in search.records() if entry[1].state != "failed"]
    num_trials = wanted.trials - sum(record.search == search.digest for _, record in known)
    if num_trials > 0:
        _tuner(search, keeper, made, experiments / f"{same}-{num_trials}", num_trials, known).fit()


def _tuner(
    search: Search,
    keeper: _Keeper,
    trainable: Any,
    place: Path,
    num_trials: int,
    known: list[tuple[Trial, TrialRecord]],
) -> Any:
    wanted, prune = search.wanted, search.wanted.prune
    finished = [record for _, record in known if record.state == "finished"]
    scheduler = FIFOScheduler()
    if prune is not None:
        scheduler = _MedianRule(
            time_attr="step",
            metric="watched",
            mode=prune.mode or wanted.mode,
            grace_period=prune.after_steps,
            min_samples_required=prune.min_trials,
            # A trial does not give way to one that waits.
            min_time_slice=float("inf"),
        )
    return ray_tune.Tuner(
        trainable,
        tune_config=ray_tune.TuneConfig(
            search_alg=_Searcher(
                distributions(search.space),
                metric="value",
                mode=wanted.mode,
                # With the same seed it would draw again what it has drawn.
                seed=wanted.seed + len(known),
                points_to_evaluate=[search.drawn(record.values) for record in finished],
                evaluated_rewards=[record.value for record in finished],
            ),
            scheduler=scheduler,
            num_samples=num_trials,
            max_concurrent_trials=wanted.concurrent,
        ),
        run_config=ray_tune.RunConfig(
            storage_path=str(place.parent),
            name=place.name,
            verbose=0,
            callbacks=[keeper],
            checkpoint_config=ray_tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    )


class _Searcher(OptunaSearch):
    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Optuna is told how trials end; what they report on the way is for the scheduler."""


class _MedianRule(MedianStoppingRule):
    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Compare with the trials of earlier processes too: Ray Tune does not keep what they reported."""
        super().on_trial_add(tune_controller, trial)
        if not self._results:
            for earlier, record in _keeper.get().search.records():
                if record.points and record.state != "failed":
                    self._results[earlier.place] = [{"step": step, "watched": value} for step, value in record.points]

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Its points are there already."""


class _Keeper(ray_tune.Callback):
    """In the flow's process: keeps the records of trials, and stops those that are pruned."""

    def __init__(self, search: Search) -> None:
        self.search, self.at_work = search, dict[str, Trial]()
        self.wrong: UnknownMetricError | None = None
        """What about the search could only be seen once a trial had run."""
        self._points: dict[str, Points] = {}
        self._tell = watch_here.get(_log)

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray Tune stores its callbacks with the experiment; restored, it has the one of the search at hand.
        return _keeper_at_hand, ()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._began(trial)

    def _began(self, trial: Any) -> None:
        self._points[trial.trial_id] = []
        lifecycle = self.at_work[trial.trial_id] = self.search.trial(trial.config)
        before = lifecycle.record()
        number = before.number if before is not None else self.search.next_number()
        record = TrialRecord(number=number, search=self.search.digest, values=lifecycle.values, state="running")
        if before is None or before.state in ("running", "failed"):
            lifecycle.keep(record)
        self._tell((lifecycle, record))

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if "value" not in result:
            self._points[trial.trial_id].append((result["step"], result["watched"]))

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        value = trial.last_result.get("value")
        self._ended(trial, state="finished" if value is not None else "pruned", value=value)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # Where Ray Tune looks itself, the file is later.
        file = trial.pickled_error_file
        error = ray.cloudpickle.loads(Path(file).read_bytes()) if file else RuntimeError("it could not be started")
        cause = root_cause(error)
        self._ended(trial, state="failed", error=f"{type(cause).__name__}: {error_summary(error)}")
        if isinstance(cause, UnknownMetricError):
            self.wrong = cause
            raise cause

    def _ended(self, trial: Any, **outcome: Any) -> None:
        if trial.trial_id not in self.at_work:
            self._began(trial)
        lifecycle = self.at_work.pop(trial.trial_id)
        before = lifecycle.record()
        assert before is not None
        outcome |= {"points": self._points.pop(trial.trial_id), "run_id": lifecycle.run().get("run_id")}
        record = before.model_copy(update={"value": None, "error": None} | outcome)
        # The same values drawn again may be pruned; that they came to an end before is worth more.
        if before.state != "finished":
            lifecycle.keep(record)
        if record.state == "pruned":
            stop_trials([lifecycle])
        self._tell((lifecycle, record))


_keeper: ContextVar[_Keeper] = ContextVar("keeper")


def _keeper_at_hand() -> _Keeper:
    return _keeper.get()


def _log(event: Event) -> None:
    log.info("trial %d %s: %s", event[1].number, event[1].values, event[1].state)
