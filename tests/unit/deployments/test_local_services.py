"""The servers of a single run: one directory each, started again when they die; a dead Ray ends the run."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import certifi
import pytest

from xray.deployments import service
from xray.deployments.local_ray import temporary_environment
from xray.deployments.local_services import LOST, OF_ONE_RUN, Health, _prefect, _server_directory
from xray.deployments.service import LOOPBACK, Service, free_port

# A run whose child is called as one of Ray's processes, and dies.
RUN = """
import subprocess, sys, time
from xray.deployments.local_services import Health
child = subprocess.Popen([sys.argv[1], "60"])
time.sleep(0.5)
with Health().watching(None):
    child.kill()
    time.sleep(60)
"""


def test_runs_in_one_output_directory_have_servers_of_their_own(tmp_path: Path) -> None:
    first, lock = _server_directory(tmp_path)
    with lock:
        second, another = _server_directory(tmp_path)
        with another:
            assert (first, second) == (tmp_path / "prefect", tmp_path / "prefect-2")
    again, lock = _server_directory(tmp_path)
    with lock:
        assert again == first


def test_a_server_of_one_run_leaves_out_what_deployments_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings import Settings

    monkeypatch.setenv("PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED", "true")  # what a person sets counts
    with _prefect(tmp_path) as server, temporary_environment(server.environment):
        settings = Settings().server
    services = settings.services
    asked = [services.scheduler, services.late_runs, services.foreman, services.triggers, services.task_run_recorder]
    assert [service.enabled for service in asked] == [False, False, False, True, True]
    assert not settings.register_blocks_on_start
    for name in OF_ONE_RUN:
        monkeypatch.delenv(name, raising=False)
    services = Settings().server.services
    assert all(service.enabled for service in (services.scheduler, services.late_runs, services.foreman))


def test_clients_of_a_runs_own_server_read_one_authority(tmp_path: Path) -> None:
    from prefect.settings import Settings

    with _prefect(tmp_path) as server:
        settings = Settings()
        assert server.address.startswith("http://127.0.0.1:")
    context = ssl.create_default_context(cafile=settings.api.ssl_cert_file)
    assert context.verify_mode == ssl.CERT_REQUIRED
    [authority] = context.get_ca_certs()
    usual = ssl.create_default_context(cafile=certifi.where()).get_ca_certs()
    assert authority in usual
    assert len(usual) > 100
    assert Settings().api.ssl_cert_file != settings.api.ssl_cert_file


def test_a_server_that_died_is_started_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    server = Service("prefect", "Prefect", command, dict(os.environ), tmp_path / "log", "here", lambda _: True)
    server.start()
    first = server.find()
    assert first is not None
    with Health().watching(server):
        first.kill()
        deadline = time.monotonic() + 30
        while server.find() in (None, first) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert server.is_healthy()
    assert server.stop()
    assert server.find() is None


def test_a_run_whose_ray_died_ends_at_once(tmp_path: Path) -> None:
    sleep = shutil.which("sleep")
    assert sleep is not None
    raylet = shutil.copy(sleep, tmp_path / "raylet")
    assert subprocess.run([sys.executable, "-c", RUN, str(raylet)], timeout=60).returncode == LOST


def test_the_environment_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XRAY_TEST_OLD", "before")
    with temporary_environment({"XRAY_TEST_OLD": "now", "XRAY_TEST_NEW": "now"}):
        assert (os.environ["XRAY_TEST_OLD"], os.environ["XRAY_TEST_NEW"]) == ("now", "now")
    assert os.environ["XRAY_TEST_OLD"] == "before"
    assert "XRAY_TEST_NEW" not in os.environ


def test_a_free_port_is_another_one_each_time_and_none_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = free_port(), free_port()
    assert first != second
    with socket.socket() as taken:
        taken.bind((LOOPBACK, second))
        monkeypatch.setattr(service, "_ports", itertools.cycle([second, first]))
        assert free_port() == first
        monkeypatch.setattr(service, "_ports", itertools.cycle([second]))
        with pytest.raises(OSError, match="no port from 20000 to 31999 is free"):
            free_port()


def test_a_task_that_begins_while_the_server_is_away_runs() -> None:
    """As a stage does in a new process, while the Prefect server is started again."""
    code = """
from uuid import uuid4
from xray.deployments.quiet import quiet_environment
quiet_environment()
from prefect import task
from prefect.task_engine import run_task_sync
@task(persist_result=False)
def seven(): return 7
done = run_task_sync(seven, task_run_id=uuid4(), parameters={}, return_type="state")
print(done.type.value, flush=True)
"""
    environment = os.environ | {"PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["COMPLETED"], done.stderr[-2000:]
