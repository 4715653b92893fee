"""A Ray of a workspace's own, in a process that has imported Ray before."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.e2e.conftest import ROOT

SCRIPT = """
import ray
from xray.deployments.local_ray import running_ray

with running_ray():
    print(ray.get(ray.remote(lambda: 6 * 7).remote()))
"""

FLOW = """
import os
from prefect import flow, task
import xray
from xray_runtime.cluster.pool.libraries import FORK_SERVER

@task
def look():
    return os.environ["RAY_AUTH_MODE"], os.getpriority(os.PRIO_PROCESS, 0), os.environ["RAY_TMPDIR"]

@flow(task_runner=xray.task_runner(), log_prints=False)
def flow_of_a_script():
    return look.submit().result(), bool(os.environ[FORK_SERVER])

for _ in range(2):
    (mode, niceness, directory), forks = flow_of_a_script()
    print("found", mode, niceness, forks, os.path.exists(directory), "RAY_AUTH_MODE" in os.environ)
"""


def test_ray_may_be_imported_before_a_workspace_is_opened() -> None:
    """Ray reads at import whether there is a token; a cluster with one would refuse the process that started it."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["42"], done.stderr[-2000:]


def test_a_flow_that_a_script_calls_has_a_private_ray() -> None:
    """Prefect's own task runner starts one without a token, whose workers starve on a busy machine."""
    # Not that of other tests, to which this process may be connected.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PREFECT_"))}
    done = subprocess.run([sys.executable, "-c", FLOW], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    found = [line for line in done.stdout.splitlines() if line.startswith("found")]
    assert found == ["found token 0 True False False"] * 2, done.stdout + done.stderr[-2000:]
