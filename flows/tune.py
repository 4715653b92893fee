"""The flows of `xray tune`: trials run side by side in threads, and Optuna says which end early."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from itertools import islice
from pathlib import Path
from typing import Any

from prefect import Flow, flow
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run

from xray.flows.lifecycle import prepare_deployment
from xray.flows.search import SearchConfig, search_space
from xray.flows.study import Search
from xray.flows.subject import Subject
from xray.flows.trial import TrialRun
from xray.flows.tune_report import report, results_markdown
from xray.tasks.prefect_run import crash_lost_flow_run
from xray.tasks.preflight import check_run
from xray.tasks.task_runner import task_runner
from xray.tasks.workspace import STOP_SECONDS
from xray_runtime.cluster.pool.nodes import nodes
from xray_runtime.cluster.pool.placement import with_device
from xray_runtime.kernel.cores import load
from xray_runtime.kernel.files import write_atomic
from xray_runtime.methods.lifecycle import LifecycleConfig

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
OnEvent = Callable[[TrialRun], None]
"""Called when a trial begins and ends."""


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


def _tune(subject: Subject, search: SearchConfig, output: str, on_event: OnEvent) -> dict[str, Any]:
    root = Path(output).absolute()
    current = Search(root, subject, search, search_space(subject, search))
    current.directory.mkdir(parents=True, exist_ok=True)
    prepare_deployment(root)
    graph = subject.recorded()
    check_run(graph, with_device(graph.runtime).device, nodes())
    before = current.directory / "flow_run"
    crash_lost_flow_run(before.read_text() if before.is_file() else None, flow_run.id)
    write_atomic(before, str(flow_run.id))
    run_search(current, on_event)
    results = report(current)
    create_markdown_artifact(results_markdown(results, search), key="search", description=f"{search.name}: {root}")
    if results["best"] is None:
        raise RuntimeError(f"no trial of {search.name} finished; the first: {results['trials'][0]['error']}")
    return results


def _log(trial: TrialRun) -> None:
    log.info("trial %d: %s", trial.number, trial.text)


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
                trial.follow()
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
