"""Flow runs that `xray down` suspends and `xray up` lets go on, on a real Prefect server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prefect import flow, task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import SetStateStatus
from prefect.states import Cancelling, Completed, Crashed, Paused, Pending, Running, Scheduled, State, Suspended

from xray.deployments.names import NO_HEARTBEAT, POOL
from xray.deployments.server_home import State as HomeState
from xray.deployments.suspension import LOST, RUN_ID, STOPPED, resolve_lost_runs, resume, run_processes, suspend
from xray_runtime.kernel.processes import TAG

HOME = HomeState(tag="suspension-test")
WORKER_TAG = f"{HOME.tag}-worker"


@flow
def work(number: int) -> int:
    return number


@pytest.fixture(scope="module")
def client(prefect: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as found:
        # The first `xray up` settles before there is a work pool.
        resolve_lost_runs(prefect, HOME)
        found.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        yield found


@pytest.fixture(scope="module")
def deployment(client: SyncPrefectClient) -> Any:
    return client.create_deployment(client.create_flow(work), "work", work_pool_name=POOL)


@pytest.fixture
def api(client: SyncPrefectClient, prefect: str) -> Iterator[str]:
    yield prefect
    for run in client.read_flow_runs():
        client.delete_flow_run(run.id)


@pytest.fixture
def begin(client: SyncPrefectClient, deployment: Any) -> Callable[..., FlowRun]:
    def begin(*states: State[Any], number: int = 1) -> FlowRun:
        run = client.create_flow_run_from_deployment(deployment, parameters={"number": number})
        for state in states:
            client.set_flow_run_state(run.id, state, force=True)
        return run

    return begin


def test_running_flows_are_suspended_and_resumed(
    client: SyncPrefectClient, api: str, begin: Callable[..., FlowRun]
) -> None:
    running = begin(Running(), number=7)
    starting = begin(Pending())
    asking = begin(Running(), Paused(timeout_seconds=600))
    approval = begin(Running(), Suspended(pause_key="approval"))
    others = {
        begin(Running(), Cancelling()).id: "Cancelled",
        begin(Scheduled()).id: "Scheduled",
        begin(Running(), Completed()).id: "Completed",
        begin(Running(), Crashed()).id: "Crashed",
    }
    assert set(suspend(api)) == {running.name, starting.name, asking.name}
    for run in (running, starting, asking):
        state = client.read_flow_run(run.id).state
        assert state is not None
        assert (state.name, state.message) == ("Suspended", STOPPED)
    # Twice changes nothing.
    assert suspend(api) == []
    assert set(resume(api, time.time())) == {running.name, starting.name, asking.name}
    for run in (running, starting, asking):
        assert client.read_flow_run(run.id).state_name == "Resuming"
    assert client.read_flow_run(running.id).parameters == {"number": 7}
    assert client.read_flow_run(approval.id).state_name == "Suspended"
    assert {run: client.read_flow_run(run).state_name for run in others} == others


def test_a_suspended_run_that_a_person_cancels_stays_cancelled(
    client: SyncPrefectClient, api: str, begin: Callable[..., FlowRun]
) -> None:
    run, resumed = begin(Running()), begin(Running())
    suspend(api)
    client.set_flow_run_state(run.id, Cancelling())
    assert client.read_flow_run(run.id).state_name == "Cancelled"
    assert resume(api, time.time()) == [resumed.name]
    client.set_flow_run_state(resumed.id, Cancelling())
    assert client.read_flow_run(resumed.id).state_name == "Cancelled"
    assert resume(api, time.time()) == []


@flow
def parent() -> int:
    return int(work(1))


def test_a_subflow_pauses_with_its_parent_and_is_taken_up_again(client: SyncPrefectClient, api: str) -> None:
    deployment = client.create_deployment(client.create_flow(parent), "parent", work_pool_name=POOL)
    run = client.create_flow_run_from_deployment(deployment)
    task_run = client.create_task_run(task(work.fn), run.id, "work-0", state=Running())
    client.set_flow_run_state(run.id, Running(), force=True)
    child = client.create_flow_run(work, parameters={"number": 1}, parent_task_run_id=task_run.id, state=Running())
    assert suspend(api) == [run.name]
    assert client.read_flow_run(child.id).state_name == "Suspended"
    assert resume(api, time.time()) == [run.name]
    # As the engine of the parent does.
    answer = client.set_flow_run_state(child.id, Running())
    assert answer.status == SetStateStatus.ACCEPT


@pytest.fixture
def process() -> Iterator[Callable[[FlowRun], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(run: FlowRun) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import time; time.sleep(600)", "prefect.engine"]
        started.append(subprocess.Popen(command, env=os.environ | {TAG: WORKER_TAG, RUN_ID: str(run.id)}))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait()


def test_after_a_power_cut_lost_runs_go_on_and_those_with_a_process_are_left(
    client: SyncPrefectClient,
    api: str,
    begin: Callable[..., FlowRun],
    process: Callable[[FlowRun], subprocess.Popen[bytes]],
) -> None:
    since = time.time()
    lost, alive, found_lost, failed = begin(Running()), begin(Running()), begin(Running()), begin(Running())
    client.set_flow_run_state(found_lost.id, Crashed(message=NO_HEARTBEAT))
    client.set_flow_run_state(failed.id, Crashed(message="Process exited with status code: -9."))
    at_work = process(alive)
    resolve_lost_runs(api, HOME)
    state = client.read_flow_run(lost.id).state
    assert state is not None
    assert (state.name, state.message) == ("Suspended", LOST)
    assert client.read_flow_run(alive.id).state_name == "Running"
    assert at_work.poll() is None
    # One that was found lost before Prefect was started last is a person's to retry.
    assert resume(api, time.time()) == [lost.name]
    assert resume(api, since) == [found_lost.name]
    names = [client.read_flow_run(run.id).state_name for run in (lost, found_lost, failed)]
    assert names == ["Resuming", "AwaitingRetry", "Crashed"]


def test_a_down_that_was_killed_is_finished_before_its_runs_go_on(
    api: str, begin: Callable[..., FlowRun], process: Callable[[FlowRun], subprocess.Popen[bytes]]
) -> None:
    run = begin(Running())
    half_stopped = process(run)
    suspend(api)
    assert set(run_processes(WORKER_TAG)) == {str(run.id)}
    resolve_lost_runs(api, HOME)
    assert half_stopped.wait(30) != 0
    assert run_processes(WORKER_TAG) == {}
    assert resume(api, time.time()) == [run.name]
