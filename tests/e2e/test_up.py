"""`xray up` as a team uses it: up, repaired, a lifecycle from the page, a copy of it with one field changed, down."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import ROOT, XRAY, Outcome, environment
from xray_runtime.processes import MARK

pytestmark = pytest.mark.e2e

PORTS = ("prefect", "mlflow", "ray", "dashboard")
STAGES = ["base", "evaluate", "ppo-1", "ppo-2", "preferences", "prepare", "reward", "sft"]
LONG = 400.0


class Chat(BaseHTTPRequestHandler):
    """Where people are told of things."""

    def __init__(self, told: list[str], *arguments: Any) -> None:
        self._told = told
        super().__init__(*arguments)

    def do_POST(self) -> None:
        self._told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
        self.send_response(200)
        self.end_headers()


class Operator:
    """Somebody with a terminal, and with Prefect's page open: the page asks what `ask` asks."""

    def __init__(self, home: Path) -> None:
        self.home, self.told = home, list[str]()
        self._chat = HTTPServer(("127.0.0.1", 0), partial(Chat, self.told))
        threading.Thread(target=self._chat.serve_forever, daemon=True).start()
        sockets = [socket.socket() for _ in PORTS]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        self._ports = {name: s.getsockname()[1] for name, s in zip(PORTS, sockets, strict=True)}
        for s in sockets:
            s.close()

    def xray(self, command: str, *arguments: str) -> Outcome:
        done = subprocess.run(
            [XRAY, command, "--home", str(self.home), *arguments],
            cwd=ROOT,
            env=environment() | {"PREFECT_WORKER_QUERY_SECONDS": "1", "XRAY_NOTIFY_URL": self._address},
            capture_output=True,
            text=True,
            timeout=LONG,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    @property
    def _address(self) -> str:
        return f"http://127.0.0.1:{self._chat.server_port}/"

    def up(self) -> None:
        done = self.xray("up", *(f"--{name}-port={port}" for name, port in self._ports.items()))
        assert done.code == 0, done.out + done.err

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.xray("status", "--json").out))

    def pids(self) -> dict[str, int]:
        return {name: service["pid"] for name, service in self.status()["services"].items()}

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        address = f"http://127.0.0.1:{self._ports['prefect']}/api/{path}"
        request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
        deadline = time.monotonic() + LONG
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                # Its database is busy: the page asks again too.
                if error.code != 503 or time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def start(self, name: str, parameters: dict[str, Any]) -> str:
        deployment = self.ask(f"deployments/name/{name}")["id"]
        return str(self.ask(f"deployments/{deployment}/create_flow_run", {"parameters": parameters})["id"])

    def until(self, condition: Callable[[], bool], why: str) -> None:
        deadline = time.monotonic() + LONG
        while not condition():
            assert time.monotonic() < deadline, why
            time.sleep(0.5)

    def ended(self, run: str) -> dict[str, Any]:
        final = ("COMPLETED", "FAILED", "CRASHED")
        self.until(lambda: self.ask(f"flow_runs/{run}")["state_type"] in final, f"{run} does not end")
        return dict(self.ask(f"flow_runs/{run}"))

    def tasks(self, run: str) -> dict[str, str]:
        found = self.ask("task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
        return {task["name"].split()[0]: task["state_name"] for task in found}

    def artifacts(self, run: str) -> dict[str, str]:
        found = self.ask("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}})
        return {artifact["key"]: str(artifact["data"]) for artifact in found if artifact["key"]}

    def left(self) -> list[str]:
        """Processes that carry the mark of this home."""
        mark = json.loads((self.home / "state.json").read_text())["mark"]
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK, "").startswith(mark):
                    found.append(" ".join(process.cmdline())[:80])
            except (psutil.Error, OSError):
                continue
        return found


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    found = Operator(tmp_path / "home")
    yield found
    found.xray("down")


@pytest.mark.timeout(1200)
def test_every_night(operator: Operator) -> None:
    operator.up()
    first = operator.pids()
    nightly = operator.ask("deployments/name/lifecycle/lifecycle")
    assert [schedule["schedule"]["cron"] for schedule in nightly["schedules"]] == ["0 2 * * *"]
    installed = {automation["name"] for automation in operator.ask("automations/filter", {})}
    assert "X-ray: a flow run whose process is gone has crashed" in installed
    assert len(installed) == 4

    config = operator.ask("deployments/name/lifecycle/lifecycle-tiny")["parameters"]["config"]
    run = operator.start("lifecycle/lifecycle-tiny", {})
    lost = operator.start("audit/audit", {"output": "/nowhere"})
    operator.up()
    assert operator.pids() == first
    assert operator.ended(lost)["state_name"] == "Failed"
    # A lifecycle goes on without the worker that started it.
    operator.until(lambda: (operator.home / "output" / "logs" / "lifecycle.log").exists(), "no lifecycle began")
    os.kill(first["worker"], signal.SIGKILL)
    assert not operator.status()["up"]
    operator.up()
    repaired = operator.pids()
    assert repaired.pop("worker") != first.pop("worker")
    assert repaired == first

    done = operator.ended(run)
    assert (done["state_name"], done["name"]) == ("Completed", "xray-tiny seed 0"), done["state"]
    assert operator.tasks(run) == dict.fromkeys(STAGES, "Completed")
    shown = operator.artifacts(run)
    assert {f"xray-{stage}-summary" for stage in STAGES} | {"lifecycle", "mlflow", "lineage"} <= set(shown)
    assert float(shown["xray-ppo-2"]) == 100.0
    assert "| reward/mean |" in shown["xray-ppo-2-summary"]
    record = json.loads((operator.home / "output" / "lifecycle.json").read_text())
    assert f"/runs/{record['run_id']}" in shown["mlflow"]
    mlflow = operator.status()["services"]["mlflow"]["address"]
    with urllib.request.urlopen(f"{mlflow}/api/2.0/mlflow/runs/get?run_id={record['run_id']}") as answer:
        tags = {tag["key"]: tag["value"] for tag in json.load(answer)["run"]["data"]["tags"]}
    assert tags["prefect.flow_run"].endswith(f"/runs/flow-run/{run}")

    # "Copy to new run", with one field changed.
    config["evaluate"]["bootstrap_samples"] = 300
    copied = operator.start("lifecycle/lifecycle-tiny", {"config": config})
    assert operator.ended(copied)["state_name"] == "Completed"
    assert operator.tasks(copied) == dict.fromkeys(STAGES, "Cached") | {"evaluate": "Completed"}

    # Told more than once now and then: better than never.
    assert {text.splitlines()[0] for text in operator.told} == {"X-ray: a run failed"}
    assert "audit /nowhere Failed" in operator.told[0]

    status = operator.status()
    assert status["up"]
    assert {name for name, service in status["services"].items() if service["up"]} == {*first, "worker"}
    assert status["champions"] == []
    assert {run["deployment"] for run in status["next"]} >= {"audit"}

    assert operator.xray("down").code == 0
    assert operator.left() == []
    assert not operator.status()["up"]
