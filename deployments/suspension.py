"""Active flow runs while the servers are down: `xray down` suspends them, the next `xray up` resumes them.

The state in Prefect is the record. `xray down` sets a run Suspended before it stops the process, so nothing reports it
as crashed. `xray up` resumes those runs, and those whose processes were lost without `xray down` (a power cut, say). A
run continues under the same id with its own parameters: finished stages come from the store, the unfinished one from
its snapshot. A run that a person suspended, or that waits for approval, does not have our pause key and stays as it is.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import psutil

from xray.deployments.names import NO_HEARTBEAT, POOL, SUSPENDED
from xray.deployments.server_home import State
from xray.deployments.servers import ask, worker_name
from xray_runtime.kernel.processes import kill, tagged

KEY = "xray-down-"
"""Prefix of the pause key of a run that X-ray resumes."""
STOPPED = f"{SUSPENDED} `xray down`. It continues by itself after `xray up`."
LOST = f"{SUSPENDED} its process was lost. It continues by itself."
RUN_ID = "PREFECT__FLOW_RUN_ID"
"""Environment variable that Prefect gives the process of a flow run."""
ACTIVE = ("RUNNING", "PENDING", "PAUSED", "CANCELLING")
MAX_RUNS = 200
STOP_SECONDS = 20.0
PATIENCE_SECONDS = 60.0
"""How long to retry while the server's database is busy."""


def is_suspended(run: dict[str, Any]) -> bool:
    """Whether X-ray suspended `run`, so that the next `xray up` resumes it."""
    return str(run["state"]["state_details"].get("pause_key") or "").startswith(KEY)


def suspend(api: str, message: str = STOPPED, except_for: Iterable[str] = ()) -> list[str]:
    """Set every active run in our pool Suspended; returns their names.

    Args:
        api: address of Prefect's API.
        except_for: ids of runs to leave alone.
    """
    names = []
    for run in _runs(api, ACTIVE):
        waits_without_process = run["state"]["state_details"]["pause_reschedule"]
        if run["id"] in except_for or waits_without_process:
            continue
        cancelled = run["state_type"] == "CANCELLING"
        state = {"type": "CANCELLED", "name": "Cancelled"} if cancelled else _suspended(message)
        # Without force Prefect only suspends running flows, not pending or paused ones.
        change = {"state": state, "force": run["state_type"] != "RUNNING"}
        answer = ask(f"{api}/flow_runs/{run['id']}/set_state", change, PATIENCE_SECONDS)
        if answer["status"] == "ACCEPT" and not cancelled:
            names.append(run["name"])
            _pause_subflows(api, run["id"], message)
    return names


def _pause_subflows(api: str, parent: str, message: str) -> None:
    """Pause subflows, or Prefect would miss their heartbeats. Their parent restarts them."""
    children = {"parent_flow_run_id": {"any_": [parent]}, "state": {"type": {"any_": ["RUNNING", "PENDING"]}}}
    for run in ask(f"{api}/flow_runs/filter", {"flow_runs": children}, PATIENCE_SECONDS):
        # Only runs of deployments can be rescheduled.
        state = _suspended(message, reschedule=False)
        ask(f"{api}/flow_runs/{run['id']}/set_state", {"state": state, "force": True}, PATIENCE_SECONDS)


def resolve_lost_runs(api: str, state: State) -> None:
    """Suspend the active runs whose processes are gone. To be called before the worker starts.

    If another machine's worker shares the pool, lost runs cannot be told from its runs; then Prefect finds them by
    their missing heartbeats.
    """
    runs = _runs(api, ACTIVE)
    if not runs:
        return
    worker_tag = f"{state.tag}-worker"
    processes = run_processes(worker_tag)
    # `xray down` was killed before it stopped these.
    half_stopped = processes.keys() & {run["id"] for run in runs if is_suspended(run)}
    kill(lambda: [p for run, p in run_processes(worker_tag).items() if run in half_stopped], STOP_SECONDS)
    online = {"workers": {"status": {"any_": ["ONLINE"]}}}
    workers = ask(f"{api}/work_pools/{POOL}/workers/filter", online, PATIENCE_SECONDS)
    if all(worker["name"] == worker_name(state) for worker in workers):
        suspend(api, LOST, except_for=processes)


def resume(api: str, since: float) -> list[str]:
    """Resume every suspended run; returns their names.

    Args:
        since: when Prefect was started, in seconds since 1970. Since then it may have found lost runs itself.
    """
    suspended = [run for run in _runs(api, ("PAUSED",)) if is_suspended(run)]
    crashed = [run for run in _runs(api, ("CRASHED",)) if _was_found_lost(run, since)]
    for run in suspended:
        ask(f"{api}/flow_runs/{run['id']}/resume", {}, PATIENCE_SECONDS)
    for run in crashed:
        # As the Retry button on the run's page does.
        state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": LOST}
        ask(f"{api}/flow_runs/{run['id']}/set_state", {"state": state}, PATIENCE_SECONDS)
    return [run["name"] for run in suspended + crashed]


def _was_found_lost(run: dict[str, Any], since: float) -> bool:
    at = datetime.fromisoformat(run["state"]["timestamp"]).timestamp()
    return run["state"]["message"] == NO_HEARTBEAT and at >= since


def run_processes(worker_tag: str) -> dict[str, psutil.Process]:
    """Flow run id → its process, of the worker with this process tag."""
    processes = {}
    for process in tagged(worker_tag):
        with contextlib.suppress(psutil.Error, OSError):
            run = process.environ().get(RUN_ID)
            if run and "prefect.engine" in process.cmdline():
                processes[run] = process
    return processes


def _suspended(message: str, reschedule: bool = True) -> dict[str, Any]:
    details = {"pause_reschedule": reschedule, "pause_key": f"{KEY}{uuid.uuid4().hex}"}
    return {"type": "PAUSED", "name": "Suspended", "message": message, "state_details": details}


def _runs(api: str, states: Iterable[str]) -> list[dict[str, Any]]:
    query = {
        "flow_runs": {"state": {"type": {"any_": list(states)}}, "deployment_id": {"is_null_": False}},
        "work_pools": {"name": {"any_": [POOL]}},
        "sort": "START_TIME_DESC",
        "limit": MAX_RUNS,
    }
    runs: list[dict[str, Any]] = ask(f"{api}/flow_runs/filter", query, PATIENCE_SECONDS)
    return runs
