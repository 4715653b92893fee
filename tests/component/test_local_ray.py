"""A Ray of a flow's own, in a process that has imported Ray before."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.e2e.conftest import ROOT
from xray.deployments.local_ray import AGENT_PORTS

FLOW = """
import json, os
import psutil
import ray
from prefect import flow, task
import xray
from xray_runtime.cluster.pool.libraries import FORK_SERVER

@task
def look():
    return os.environ["RAY_AUTH_MODE"], os.getpriority(os.PRIO_PROCESS, 0), os.environ["RAY_TMPDIR"]

@flow(task_runner=xray.task_runner(), log_prints=False)
def flow_of_a_script():
    found = look.submit().result(), bool(os.environ[FORK_SERVER])
    return *found, [process.cmdline() for process in psutil.Process().children(recursive=True)]

for _ in range({times}):
    (mode, niceness, directory), forks, commands = flow_of_a_script()
    print("commands", json.dumps(commands))
    print("found", mode, niceness, forks, os.path.exists(directory), "RAY_AUTH_MODE" in os.environ)
"""


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_flow_that_a_script_calls_has_a_private_ray(times: int) -> None:
    """Prefect's own task runner starts one without a token, whose workers starve on a busy machine. Ray reads at import
    whether there is a token; a cluster with one would refuse the process that started it.

    The processes show that `_patient_node` still changes what this version of Ray starts.
    """
    # Not that of other tests, to which this process may be connected.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PREFECT_"))}
    done = subprocess.run(
        [sys.executable, "-c", FLOW.replace("{times}", str(times))],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("found")]
    assert found == ["found token 0 True False False"] * times, done.stdout + done.stderr[-2000:]
    for line in done.stdout.splitlines():
        if line.startswith("commands "):
            check_processes(json.loads(line.removeprefix("commands ")))


def check_processes(commands: list[list[str]]) -> None:
    for needless in ("monitor.py", "log_monitor.py", "dashboard/dashboard.py", "dashboard/agent.py"):
        # A raylet's arguments name the program that was to start its agent.
        assert not [c for c in commands if any(argument.endswith(needless) for argument in c)]
    [raylet] = [command for command in commands if command[:1] and command[0].endswith("raylet/raylet")]
    for name in AGENT_PORTS[:2]:
        [port] = [a for a in raylet if a.replace("_", "-").startswith(f"--{name}=".replace("_", "-"))]
        assert int(port.partition("=")[2]) > 0
    assert "--num_prestart_python_workers=0" in raylet
    assert any(a.startswith("--dashboard_agent_command=sh -c") for a in raylet)


IDLE = """
import os, time
import psutil
import ray
from xray.deployments.local_ray import running_ray

@ray.remote(num_cpus=0)
def pid():
    return os.getpid()

with running_ray(num_cpus=2):
    worker, end = ray.get(pid.remote()), time.monotonic() + 60
    while psutil.pid_exists(worker) and time.monotonic() < end:
        time.sleep(0.1)
    print("ended", not psutil.pid_exists(worker))
"""


def test_an_idle_worker_ends_though_cpus_are_free() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env["RAY_idle_worker_killing_time_threshold_ms"] = "300"  # of 10 seconds
    done = subprocess.run([sys.executable, "-c", IDLE], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout == "ended True\n", done.stderr[-2000:]
