"""Ray's servers may take long to start; a dead one is named at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from xray.deployments.local_ray import _wait_until, private_ray, ray_servers
from xray.deployments.patience import NotUpError
from xray_runtime.kernel.config.validation import ConfigError


@pytest.fixture
def raylet(tmp_path: Path) -> Any:
    """A child of this process that is called as Ray's server."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    program = shutil.copy(sleep, tmp_path / "raylet")
    return lambda: subprocess.Popen([program, "60"])


def test_a_server_that_dies_is_named_with_its_log(tmp_path: Path, raylet: Any) -> None:
    logs = tmp_path / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("[12:00:00 I 1 1] starting\n[12:00:01 C 1 1] no port is free\n*** stack\n@ main\n")
    (logs / "raylet.err").touch()
    child = raylet()
    while not ray_servers():
        time.sleep(0.01)
    polls = 0

    def works() -> bool:
        nonlocal polls
        polls += 1
        if polls == 3:
            child.kill()
        return False

    with pytest.raises(NotUpError, match=r"^raylet of Ray ended .* The end of .*raylet.out: .* no port is free$"):
        _wait_until(works, lambda: None, ray_servers, tmp_path)
    assert polls >= 3
    child.wait()


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
