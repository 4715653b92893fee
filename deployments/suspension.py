"""Flow runs at work when the servers go down: `xray down` suspends them, the next `xray up` lets them go on.

The state in Prefect is the record. A run that `xray down` stops is Suspended there before its process is asked to end,
so nothing reports it as crashed. `xray up` resumes exactly those runs, and those whose processes were lost without
`xray down` (a power cut, say). A run goes on under the same id and with its own parameters: finished stages are taken
from the store, the stage at work goes on from its snapshot.

A run that somebody suspended, or that waits for an approval, has no pause key of ours and stays as it is.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import psutil

from xray.deployments.presets import NO_HEARTBEAT, POOL, SUSPENDED
from xray.deployments.server_home import State
from xray.deployments.servers import ask, worker_name
from xray_runtime.processes import kill, tagged

KEY = "xray-down-"
"""Start of the pause key of a run that goes on by itself."""
STOPPED = f"{SUSPENDED} `xray down`. It goes on by itself after `xray up`."
LOST = f"{SUSPENDED} its process was lost. It goes on by itself."
RUN_ID = "PREFECT__FLOW_RUN_ID"
"""Environment variable that Prefect gives the process of a flow run."""
AT_WORK = ("RUNNING", "PENDING", "PAUSED", "CANCELLING")
MAX_RUNS = 200
STOP_SECONDS = 20.0
PATIENCE_SECONDS = 60.0
"""How long a server whose database is busy is asked again."""


def is_suspended(run: dict[str, Any]) -> bool:
    """Whether `run` was suspended here, and goes on at the next `xray up`."""
    return str(run["state"]["state_details"].get("pause_key") or "").startswith(KEY)


def suspend(api: str, message: str = STOPPED, except_for: Iterable[str] = ()) -> list[str]:
    """Set every run at work in our pool Suspended; returns their names.

    Args:
        api: address of Prefect's API.
        except_for: ids of runs that are left alone.
    """
    names = []
    for run in _runs(api, AT_WORK):
        waits_without_process = run["state"]["state_details"]["pause_reschedule"]
        if run["id"] in except_for or waits_without_process:
            continue
        cancelled = run["state_type"] == "CANCELLING"
        state = {"type": "CANCELLED", "name": "Cancelled"} if cancelled else _suspended(message)
        # Prefect itself suspends only what runs, not what is about to start or waits for an answer.
        asked = {"state": state, "force": run["state_type"] != "RUNNING"}
        answer = ask(f"{api}/flow_runs/{run['id']}/set_state", asked, PATIENCE_SECONDS)
        if answer["status"] == "ACCEPT" and not cancelled:
            names.append(run["name"])
            _pause_subflows(api, run["id"], message)
    return names


def _pause_subflows(api: str, parent: str, message: str) -> None:
    """Without this Prefect would miss the heartbeats of subflows; when their parent goes on, it takes them up again."""
    children = {"parent_flow_run_id": {"any_": [parent]}, "state": {"type": {"any_": ["RUNNING", "PENDING"]}}}
    for run in ask(f"{api}/flow_runs/filter", {"flow_runs": children}, PATIENCE_SECONDS):
        # Only what has a deployment can be rescheduled.
        state = _suspended(message, reschedule=False)
        ask(f"{api}/flow_runs/{run['id']}/set_state", {"state": state, "force": True}, PATIENCE_SECONDS)


def settle(api: str, state: State) -> None:
    """Before the worker starts: what its predecessor left either has a process and is at work, or is suspended.

    Where another machine's worker takes runs from the pool too, lost runs cannot be told from that worker's; Prefect
    notices them itself, by their missing heartbeats.
    """
    runs = _runs(api, AT_WORK)
    if not runs:
        return
    worker_tag = f"{state.tag}-worker"
    processes = run_processes(worker_tag)
    # `xray down` was killed before it ended these.
    half_stopped = processes.keys() & {run["id"] for run in runs if is_suspended(run)}
    kill(lambda: [p for run, p in run_processes(worker_tag).items() if run in half_stopped], STOP_SECONDS)
    online = {"workers": {"status": {"any_": ["ONLINE"]}}}
    workers = ask(f"{api}/work_pools/{POOL}/workers/filter", online, PATIENCE_SECONDS)
    if all(worker["name"] == worker_name(state) for worker in workers):
        suspend(api, LOST, except_for=processes)


def resume(api: str, since: float) -> list[str]:
    """Let every suspended run go on; returns their names.

    Args:
        since: when Prefect was started, in seconds since 1970. It may have noticed a lost run itself since then.
    """
    suspended = [run for run in _runs(api, ("PAUSED",)) if is_suspended(run)]
    crashed = [run for run in _runs(api, ("CRASHED",)) if _was_found_lost(run, since)]
    for run in suspended:
        ask(f"{api}/flow_runs/{run['id']}/resume", {}, PATIENCE_SECONDS)
    for run in crashed:
        # As the button Retry does on the run's page.
        state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": LOST}
        ask(f"{api}/flow_runs/{run['id']}/set_state", {"state": state}, PATIENCE_SECONDS)
    return [run["name"] for run in suspended + crashed]


def _was_found_lost(run: dict[str, Any], since: float) -> bool:
    at = datetime.fromisoformat(run["state"]["timestamp"]).timestamp()
    return run["state"]["message"] == NO_HEARTBEAT and at >= since


def run_processes(worker_tag: str) -> dict[str, psutil.Process]:
    """The processes of flow runs that a worker with this process tag started, by the run's id."""
    found = {}
    for process in tagged(worker_tag):
        with contextlib.suppress(psutil.Error, OSError):
            run = process.environ().get(RUN_ID)
            if run and "prefect.engine" in process.cmdline():
                found[run] = process
    return found


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
    found: list[dict[str, Any]] = ask(f"{api}/flow_runs/filter", query, PATIENCE_SECONDS)
    return found
