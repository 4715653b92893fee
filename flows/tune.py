"""The flow behind `xray tune`: Ray Tune asks Optuna for values, a trial is a lifecycle, bad ones are ended early.

One trial is at work at a time: it has the whole cluster, and every stage that an earlier trial has computed is there.
The searcher draws from the search's seed and hears of the trials in their order, so the same search tries the same
values. That is also how it goes on after a kill: it begins anew, and finished trials report from their records at once.
Ray Tune's own snapshot of an experiment is not used: it is pickled, and its number of trials is fixed.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What Ray Tune reads when it is imported: no reporters, no handler of its own for Ctrl-C; metrics come when they come.
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
os.environ.setdefault("TUNE_DISABLE_STRICT_METRIC_CHECKING", "1")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import optuna
import ray
from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import deployment, flow_run
from ray import tune as ray_tune
from ray.tune.schedulers import FIFOScheduler, MedianStoppingRule
from ray.tune.search.optuna import OptunaSearch

from xray.flows.lifecycle import STOP_SECONDS, terminate
from xray.flows.search import SearchConfig, Space, Span, search_space
from xray.flows.trials import Trial, TrialRecord, search_directory, start_runner, write_record
from xray.flows.tune_report import report, results_markdown
from xray.tasks.prefect_state import crash_lost_flow_run
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.validation import ConfigError
from xray_runtime.errors import error_summary, root_cause
from xray_runtime.files import write_atomic
from xray_runtime.processes import redirect_output
from xray_runtime.progress import open_progress

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
OUTCOMES = {"value", "failed", "wrong"}
"""How a trial's last report says how it came out."""
Event = tuple[int, Trial, TrialRecord | None]
"""(number of the trial, the trial, how it came out; None when it begins)."""
watch_here: ContextVar[Callable[[Event], None]] = ContextVar("watch_here")
"""Who is told when a trial begins and ends."""


@flow(name="tune", flow_run_name="{search.name} on {config.project}", persist_result=False)
def tune(config: LifecycleConfig, search: SearchConfig, output: str = "runs/lifecycle") -> dict[str, Any]:
    """Search fields of `config` in the directory `output`; returns what `results.json` says.

    Raises:
        ConfigError: the search does not fit the config, or its metric is never logged.
        RuntimeError: no trial finished.
    """
    root = Path(output).absolute()
    directory = search_directory(root, search.name)
    directory.mkdir(parents=True, exist_ok=True)
    (root / "logs").mkdir(exist_ok=True)
    if deployment.id is not None and threading.current_thread() is threading.main_thread():
        redirect_output(root / "logs" / "tune.log")
        signal.signal(signal.SIGTERM, terminate)
    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS"), namespace="xray", log_to_driver=False, logging_level="ERROR")
    before = directory / "flow_run"
    crash_lost_flow_run(before.read_text() if before.is_file() else None, flow_run.id)
    write_atomic(before, str(flow_run.id))
    trials = run_search(root, config, search)
    results = report(directory, config, search, trials)
    create_markdown_artifact(results_markdown(results, search), key="search", description=f"{search.name}: {root}")
    if results["best"] is None:
        raise RuntimeError(f"no trial of {search.name} finished; the first: {trials[0][1].error}")
    return results


def run_search(root: Path, config: LifecycleConfig, search: SearchConfig) -> list[tuple[Trial, TrialRecord]]:
    """Run what of the search has not been run, on Ray; returns all its trials in their order. Raises as `tune`."""
    space = search_space(config, search)
    runner, board = start_runner(), open_progress()
    job = _Search(root, config, search, space, runner)
    summary = _Journal(job, board)
    scratch = search_directory(root, search.name) / "ray"
    # Of a search that was killed.
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        warnings.filterwarnings("ignore", "fail_fast='raise'")
        _tuner(job, summary, scratch).fit()
    except Exception:
        # Ray Tune makes text of what a callback raises.
        if summary.wrong is not None:
            raise ConfigError(summary.wrong) from None
        raise
    except BaseException:
        # The trial at work makes a snapshot first.
        ray.get(board.stop.remote())
        ray.wait([runner.idle.remote()], timeout=STOP_SECONDS)
        raise
    finally:
        ray.kill(runner)
        shutil.rmtree(scratch, ignore_errors=True)
    return summary.trials


@dataclass(frozen=True)
class _Search:
    root: Path
    config: LifecycleConfig
    search: SearchConfig
    space: Space
    runner: Any

    def trial(self, drawn: dict[str, Any]) -> Trial:
        """The trial of what Ray Tune drew."""
        values = {
            path: values[drawn[path]] if isinstance(values, list) else drawn[path]
            for path, values in self.space.items()
        }
        return Trial(self.root, self.config, self.search, values)


def _tuner(job: _Search, summary: _Journal, scratch: Path) -> Any:
    search, prune = job.search, job.search.prune
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    scheduler = FIFOScheduler()
    if prune is not None:
        scheduler = MedianStoppingRule(
            time_attr="step",
            metric="watched",
            mode=prune.mode or search.mode,
            grace_period=prune.after_steps,
            min_samples_required=prune.min_trials,
        )
    here = f"node:{ray.util.get_node_ip_address()}"
    return ray_tune.Tuner(
        ray_tune.with_resources(
            ray_tune.with_parameters(_Watcher, job=job), ray_tune.PlacementGroupFactory([{"CPU": 0, here: 0.001}])
        ),
        param_space={path: _domain(values) for path, values in job.space.items()},
        tune_config=ray_tune.TuneConfig(
            search_alg=_Searcher(metric="value", mode=search.mode, seed=search.seed),
            scheduler=scheduler,
            num_samples=search.trials,
            max_concurrent_trials=1,
            reuse_actors=True,
        ),
        run_config=ray_tune.RunConfig(
            storage_path=str(scratch),
            name=search.name,
            verbose=0,
            callbacks=[summary],
            # What a trial fails of, it reports; what is raised here is the search's own trouble.
            failure_config=ray_tune.FailureConfig(fail_fast="raise"),
            checkpoint_config=ray_tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    )


def _domain(values: Span | list[Any]) -> Any:
    if isinstance(values, list):
        # By index: what may be chosen need not be something Optuna can compare.
        return ray_tune.choice(list(range(len(values))))
    if values.whole:
        return (ray_tune.lograndint if values.log else ray_tune.randint)(int(values.low), int(values.high) + 1)
    return (ray_tune.loguniform if values.log else ray_tune.uniform)(values.low, values.high)


class _Searcher(OptunaSearch):
    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Optuna is told how trials end; what they report on the way is for the scheduler."""


class _Watcher(ray_tune.Trainable):
    """Ray Tune's side of a trial: starts it, and reports what pruning watches, then the value."""

    def setup(self, config: dict[str, Any], job: _Search) -> None:
        self._job = job
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._trial = self._job.trial(new_config)
        self._sent: list[tuple[int, float]] = []
        self._running: Any = None
        self._told: TrialRecord | None = None
        return True

    def step(self) -> dict[str, Any]:
        try:
            return self._step()
        except Exception as error:
            return self._last(failed=f"{type(root_cause(error)).__name__}: {error_summary(error)}")

    def _step(self) -> dict[str, Any]:
        if not self._sent:
            self._told = self._trial.record()
        record = self._told
        points = record.points if record is not None else []
        if record is None or (record.state == "pruned" and len(points) <= len(self._sent)):
            # Of a trial that was pruned, and is not this time, the rest is needed.
            points = self._wait()
        if len(points) > len(self._sent):
            step, value = points[len(self._sent)]
            self._sent.append((step, value))
            return {"step": step, "watched": value}
        if record is not None and record.state == "finished":
            return self._last(value=record.value)
        return self._ended()

    def _wait(self) -> list[tuple[int, float]]:
        """The points so far, when there is a new one or the trial has ended. Raises what its lifecycle failed of."""
        if self._running is None:
            self._running = self._job.runner.run.remote(self._trial)
        while True:
            ended = bool(ray.wait([self._running], timeout=POLL_SECONDS)[0])
            points = self._trial.points()
            if len(points) > len(self._sent):
                return points
            if ended:
                if not ray.get(self._running):
                    raise RuntimeError("its lifecycle was stopped")
                return points

    def _ended(self) -> dict[str, Any]:
        search = self._job.search
        wanted = [("metric", search.until, search.metric)]
        if search.watched is not None:
            wanted.append(("prune.metric", *search.watched))
        for field, stage, metric in wanted:
            series = self._trial.series(stage)
            if metric not in series:
                known = ", ".join(sorted(series))
                return self._last(wrong=f"{field}: {metric!r} is not allowed: stage {stage!r} logs {known}")
        value = self._trial.series(search.until)[search.metric][-1][1]
        if not math.isfinite(value):
            return self._last(failed=f"{search.metric} is {value}")
        return self._last(value=value)

    def _last(self, **outcome: Any) -> dict[str, Any]:
        # The scheduler keeps this beside the points: after the last step, before any other, so that none counts twice.
        step, watched = self._sent[-1] if self._sent else (0, math.nan)
        return {"step": step + 0.5, "watched": watched, "done": True, **outcome}


class _Journal(ray_tune.Callback):
    """In the flow's process: stops the trials that are pruned, and writes down how each came out."""

    def __init__(self, job: _Search, board: Any) -> None:
        self.trials: list[tuple[Trial, TrialRecord]] = []
        self.wrong: str | None = None
        """What about the search could only be seen once a trial had run."""
        self._job, self._board = job, board
        self._points: list[tuple[int, float]] = []
        self._tell = watch_here.get(_log)

    def __getstate__(self) -> dict[str, Any]:
        # Ray Tune keeps a pickled copy of its callbacks, which nobody reads, and a terminal cannot be pickled.
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._points = []
        self._tell((len(self.trials), self._job.trial(trial.config), None))

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        self.wrong = result.get("wrong")
        if self.wrong is not None:
            raise ConfigError(self.wrong)
        # Of a point at which a trial is pruned, `done` says true as well.
        if not OUTCOMES & set(result):
            self._points.append((result["step"], result["watched"]))

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        lifecycle, last = self._job.trial(trial.config), trial.last_result
        value, failed = last.get("value"), last.get("failed")
        if value is None and failed is None:
            ray.get(self._board.stop.remote())
            ray.get(self._job.runner.idle.remote())
            lifecycle.drop_snapshots()
        record = TrialRecord(
            values=lifecycle.values,
            state="finished" if value is not None else "failed" if failed is not None else "pruned",
            value=value,
            points=self._points,
            error=failed,
            run_id=lifecycle.run_id(),
        )
        # The same values drawn again may be pruned; that they came to an end before is worth more.
        if record.state == "finished" or lifecycle.record() is None:
            write_record(lifecycle, record)
        self._tell((len(self.trials), lifecycle, record))
        self.trials.append((lifecycle, record))


def _log(event: Event) -> None:
    number, trial, record = event
    log.info("trial %d %s: %s", number, trial.values, record.state if record is not None else "begins")
