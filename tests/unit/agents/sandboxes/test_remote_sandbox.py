"""The three calls against a service in this process, which runs commands in directories as a container would."""

from __future__ import annotations

import base64
import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agents.answering import Answering, serving
from xray_runtime.agents.sandboxes.base import Box, Ended, Limits, Program
from xray_runtime.agents.sandboxes.remote import RemoteSandbox

LIMITS = Limits(timeout_s=20.0, memory_mb=512, output_bytes=1000, processes=8, disk_mb=16)


class Service(ThreadingHTTPServer):
    """Holds the limit of time."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.boxes = root, dict[str, dict[str, Any]]()
        self.keys: list[str | None] = []
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.fault: tuple[bytes, int] | None = None
        self.url = f"http://127.0.0.1:{self.server_port}"

    def start(self, body: dict[str, Any]) -> dict[str, Any]:
        name = f"box{len(self.boxes)}"
        self.boxes[name] = body
        (self.root / name).mkdir()
        if body["files"] is not None:
            with tarfile.open(fileobj=io.BytesIO(base64.b64decode(body["files"]))) as archive:
                archive.extractall(self.root / name, filter="data")
        return {"id": name}

    def run(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        process = subprocess.Popen(
            body["command"],
            cwd=self.root / name,
            env={"PATH": os.defpath} | body["variables"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.running[name] = process
        limit = self.boxes[name]["limits"]["timeout_s"]
        try:
            output, _ = process.communicate(body["stdin"], limit)
        except subprocess.TimeoutExpired:
            self.stop(name)
            return {"broken": f"it took longer than timeout_s = {limit:g}"}
        return {"code": process.returncode, "output": output}

    def stop(self, name: str) -> None:
        if name in self.running and self.running[name].poll() is None:
            os.killpg(self.running[name].pid, signal.SIGKILL)


class Handler(Answering):
    server: Service

    def do_POST(self) -> None:
        body = self.body()
        self.server.keys.append(self.headers["authorization"])
        if self.server.fault is not None:
            self.answer(*self.server.fault)
            return
        parts = self.path.strip("/").split("/")
        self.answer(self.server.start(body) if len(parts) == 1 else self.server.run(parts[1], body))

    def do_DELETE(self) -> None:
        name = self.path.rpartition("/")[2]
        self.server.stop(name)
        del self.server.boxes[name]
        self.answer(b"", 204)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    (tmp_path / "boxes").mkdir()
    with serving(Service(tmp_path / "boxes")) as server:
        yield server


def test_a_program_runs_behind_the_three_calls(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XRAY_API_KEYS", f"127.0.0.1:{service.server_port}=the-key")
    (tmp_path / "mine" / "sub").mkdir(parents=True)
    (tmp_path / "mine" / "sub" / "file").write_text("content")
    sandbox = RemoteSandbox(service.url)
    name = sandbox.start(Box(LIMITS, tmp_path / "mine", gateway="http://10.0.0.1:8000"))
    assert service.boxes[name]["limits"]["processes"] == 8
    assert service.boxes[name]["gateway"] == sandbox.address("http://10.0.0.1:8000") == "http://10.0.0.1:8000"
    code = "import os; print(input(), open('sub/file').read(), os.environ['X']); raise SystemExit(3)"
    ended = sandbox.run(name, Program([sys.executable, "-c", code], "task", {"X": "x"})).result(60)
    assert ended == Ended(3, "task content x\n")
    sandbox.stop(name)
    sandbox.stop(name)
    assert service.boxes == {}
    assert set(service.keys) == {"Bearer the-key"}
    sandbox.close()


def test_limits_and_a_stop_end_a_program(service: Service) -> None:
    sandbox = RemoteSandbox(service.url)
    sleeps = Program(["sleep", "600"], "", {})
    name = sandbox.start(Box(replace(LIMITS, timeout_s=0.5)))
    assert sandbox.run(name, sleeps).result(60) == Ended(broken="it took longer than timeout_s = 0.5")
    other = sandbox.start(Box(LIMITS))
    ended = sandbox.run(other, sleeps)
    while other not in service.running:
        threading.Event().wait(0.01)
    sandbox.close()
    assert ended.result(60).code == -9
    assert service.boxes == {}


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ((b"", 500), "RuntimeError: status 500"),
        ((b"no", 200), "AnswerError: the answer is not JSON"),
        ((b"[]", 200), "ValueError: the answer is not an object"),
        ((b'{"id": "../up", "code": "0", "output": ""}', 200), "ValueError: "),
        ((b'{"code": true, "output": ""}', 200), "Error: "),
    ],
)
def test_a_service_that_fails_is_infrastructure(service: Service, fault: tuple[bytes, int], why: str) -> None:
    sandbox = RemoteSandbox(service.url)
    name = sandbox.start(Box(LIMITS))
    service.fault = fault
    ended = sandbox.run(name, Program(["true"], "", {})).result(60)
    assert (ended.code, ended.broken) == (None, None)
    assert why in str(ended.infrastructure)
    with pytest.raises(OSError, match=why):
        sandbox.start(Box(LIMITS))
    sandbox.close()


def test_a_service_that_is_gone_is_infrastructure(service: Service) -> None:
    sandbox = RemoteSandbox(service.url)
    name = sandbox.start(Box(LIMITS))
    service.shutdown()
    service.server_close()
    assert "ConnectError" in str(sandbox.run(name, Program(["true"], "", {})).result(60).infrastructure)
    sandbox.close()
