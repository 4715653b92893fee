"""Ray's own servers are waited for as long as they live, and a dead one is named at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xray.deployments.local_ray import AGENT_PORTS, _patiently, is_dead, private_ray, ray_servers
from xray.deployments.patience import NotUpError
from xray_runtime.kernel.config.validation import ConfigError


@pytest.fixture
def raylet(tmp_path: Path) -> Any:
    """A child of this process that is called as Ray's server."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    program = shutil.copy(sleep, tmp_path / "raylet")
    return lambda: subprocess.Popen([program, "60"])


def test_ray_waits_longer_than_it_would(tmp_path: Path, raylet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import node, services

    asked = 0

    def get_node(*_: Any) -> str:
        nonlocal asked
        asked += 1
        if asked < 4:
            raise RuntimeError("not there yet")
        return "here"

    monkeypatch.setattr(services, "get_node", get_node)
    monitor = node.Node.start_monitor
    with _patiently(tmp_path, lambda: None, ("start_monitor",)):
        child = raylet()
        assert services.get_node("address", "id") == "here"
        assert node.Node.start_monitor is not monitor
    child.kill()
    child.wait()
    assert asked == 4
    assert services.get_node is get_node
    assert node.Node.start_monitor is monitor


def test_a_server_that_dies_is_named_with_its_log(tmp_path: Path, raylet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Ray itself would go on waiting: it does so after every RuntimeError."""
    from ray._private import services

    def get_node(*_: Any) -> str:
        raise RuntimeError("not there yet")

    logs = tmp_path / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("[12:00:00 I 1 1] starting\n[12:00:01 C 1 1] no port is free\n*** stack\n@ main\n")
    (logs / "raylet.err").touch()
    monkeypatch.setattr(services, "get_node", get_node)
    with _patiently(tmp_path, lambda: None):
        child = raylet()
        while not ray_servers():
            time.sleep(0.01)
        child.kill()
        while not all(map(is_dead, ray_servers())):
            time.sleep(0.01)
        with pytest.raises(
            NotUpError, match=r"^raylet of Ray ended .* The end of .*raylet.out: .* no port is free$"
        ) as e:
            services.get_node("address", "id")
    assert not isinstance(e.value, RuntimeError)
    child.wait()


def test_a_raylet_does_not_wait_for_the_ports_of_its_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would die 15 seconds after its start."""
    from ray._private import node

    given = SimpleNamespace(dashboard_agent_listen_port=52365, metrics_agent_port=0, metrics_export_port=None)
    given.runtime_env_agent_port = 0
    monkeypatch.setattr(node.Node, "start_raylet", lambda self: dict(vars(self._ray_params)))
    with _patiently(tmp_path, lambda: None):
        node.Node.start_raylet(SimpleNamespace(_ray_params=given, _session_dir=str(tmp_path), _node_id="0123" * 14))
    ports = [getattr(given, name) for name in AGENT_PORTS]
    assert given.dashboard_agent_listen_port == 52365
    assert all(ports)
    assert len({*ports}) == len(AGENT_PORTS)
    assert [int((tmp_path / f"{name}_{'0123' * 14}").read_text()) for name in AGENT_PORTS] == ports


def test_a_temporary_directory_that_cannot_be_made_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("tempfile.tempdir", "/tmp/absent-" + uuid.uuid4().hex[:8])
    with pytest.raises(ConfigError, match=r"^TMPDIR: Ray needs a temporary directory: .*No such file"), private_ray():
        pass
    assert "RAY_TMPDIR" not in os.environ


@pytest.mark.parametrize(("length", "parent"), [(25, "its own"), (26, "/tmp")])
def test_a_temporary_directory_that_is_too_long_for_sockets_is_not_used(
    monkeypatch: pytest.MonkeyPatch, length: int, parent: str
) -> None:
    """Ray would raise an error of its own, in every attempt of a run. 25 + 82 bytes make a path of 107."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    long = Path(f"/tmp/{uuid.uuid4().hex}"[:length])
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    try:
        with private_ray():
            directory = Path(os.environ["RAY_TMPDIR"])
            assert str(directory.parent) == (str(long) if parent == "its own" else parent)
            socket = directory / "ray/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
            assert len(os.fsencode(socket)) <= 107
    finally:
        long.rmdir()
