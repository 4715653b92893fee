"""Workers that are forked from processes with their libraries."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from tests.e2e.conftest import ROOT
from tests.waiting import wait_until
from xray.deployments.fork_server import fork_server
from xray_runtime.cluster.pool.libraries import FORK_SERVER, STAGE, worker_options

pytestmark = pytest.mark.skipif(fork_server() is None, reason="this machine has a GPU, or is no Linux")


class Probe:
    def modules(self) -> set[str]:
        return {name for name in ("torch", "deepspeed", "vllm", "mlflow") if sys.modules.get(name)}

    def pid(self) -> int:
        return os.getpid()

    def random(self) -> float:
        import numpy as np

        return float(np.random.random())

    def new_pages(self) -> list[int]:
        """Pages that the system gives for 256 MiB, and for 256 MiB after those were freed."""
        import numpy as np

        found = []
        for _ in range(2):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            np.ones(2**25)
            found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        return found

    def server(self) -> str:
        return os.environ[FORK_SERVER]


def probe(**options: Any) -> Any:
    return ray.remote(Probe).options(num_cpus=0, **options).remote()


@pytest.mark.parametrize(
    ("libraries", "modules"),
    [
        ("trainer:deepspeed", {"torch", "deepspeed"}),
        ("generator:vllm", {"torch", "vllm"}),
        (STAGE, {"torch", "mlflow"}),
    ],
)
def test_a_worker_begins_with_its_libraries(cluster: None, libraries: str, modules: set[str]) -> None:
    first, second = (probe(**worker_options(libraries)) for _ in range(2))
    assert ray.get([first.modules.remote(), second.modules.remote()]) == [modules, modules]
    # Forks of one process must not draw the same numbers.
    assert len(set(ray.get([first.random.remote(), second.random.remote()]))) == 2
    pids = ray.get([first.pid.remote(), second.pid.remote()])
    for actor in (first, second):
        ray.kill(actor)
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), seconds=120)


def test_a_workhorse_keeps_the_memory_that_it_frees(cluster: None) -> None:
    """Each step else takes new pages for its gradients, which the system must clear."""
    first, second = ray.get(probe(**worker_options("trainer:deepspeed")).new_pages.remote())
    assert second < 0.01 * first


def test_another_worker_has_none_of_them(cluster: None) -> None:
    assert ray.get(probe().modules.remote()) == set()


SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from tests.component.test_fork_server import Probe, probe
from xray.deployments.fork_server import fork_server
from xray.deployments.local_ray import running_ray
from xray_runtime.cluster.pool.libraries import worker_options
import ray

with running_ray(num_cpus=2):
    actors = [probe(**worker_options("trainer:deepspeed")), probe()]
    print(json.dumps(ray.get([actor.pid.remote() for actor in actors])), flush=True)
    print(fork_server().address, flush=True)
    sys.stdin.readline()
    print(json.dumps(sorted(ray.get(probe(**worker_options("trainer:deepspeed")).modules.remote()))), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def script() -> Any:
    command = [sys.executable, "-c", SCRIPT]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        with contextlib.suppress(BrokenPipeError):
            process.kill()


@pytest.mark.long
def test_workers_start_without_a_server_that_was_killed(script: Any) -> None:
    json.loads(script.stdout.readline())
    address = script.stdout.readline().strip()
    for process in psutil.Process(script.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if address in process.cmdline():
                process.kill()
    script.stdin.write("go\n")
    script.stdin.flush()
    # It has imported nothing yet.
    assert json.loads(script.stdout.readline()) == []


# The lifecycle under injected faults, which leaves nothing running, has these servers too.
@pytest.mark.long
def test_everything_ends_with_a_driver_that_is_killed(script: Any) -> None:
    pids = json.loads(script.stdout.readline())
    address = script.stdout.readline().strip()
    servers = [p for p in psutil.Process(script.pid).children(recursive=True) if address in p.cmdline()]
    assert len(servers) >= 4
    os.kill(script.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(psutil.pid_exists, [*pids, *(server.pid for server in servers)])), seconds=120)
    assert not Path(address).parent.exists()


TWO_RAYS = """
import json
from tests.component.test_fork_server import probe
from xray.deployments.fork_server import fork_server
from xray.deployments.local_ray import running_ray
from xray_runtime.cluster.pool.libraries import STAGE, worker_options
import ray

for _ in range(2):
    fork_server().load()
    with running_ray(num_cpus=2):
        actors = [probe(**worker_options(name)) for name in (STAGE, "trainer:deepspeed")]
        found = ray.get([actor.modules.remote() for actor in actors])
        print(json.dumps([sorted(modules) for modules in found]), flush=True)
"""


@pytest.mark.long
def test_a_second_ray_of_a_process_has_them_too() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    result = subprocess.run(
        [sys.executable, "-c", TWO_RAYS], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert found == 2 * [[["mlflow", "torch"], ["deepspeed", "torch"]]]
