"""Somebody who works with `xray up`: at a terminal, and through what Prefect's pages ask its server."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.conftest import ROOT, XRAY, Outcome, environment
from tests.waiting import wait_until
from xray.deployments.service import free_port
from xray_runtime.kernel.processes import TAG

PORTS = ("prefect", "mlflow", "ray", "dashboard")
LONG = 900.0
"""Seconds anything may take on a machine that does other things too."""


class Chat(BaseHTTPRequestHandler):
    """Where people are told of things."""

    def __init__(self, notifications: list[str], *arguments: Any) -> None:
        self._told = notifications
        super().__init__(*arguments)

    def do_POST(self) -> None:
        self._told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
        self.send_response(200)
        self.end_headers()


class Operator:
    """Somebody with a terminal, and with Prefect's page open: the page asks what `ask` asks."""

    def __init__(self, home: Path) -> None:
        self.home, self.notifications = home, list[str]()
        self.variables: dict[str, str] = {}
        """With these other commands work on what `up` started: it prints them."""
        self._chat = HTTPServer(("127.0.0.1", 0), partial(Chat, self.notifications))
        threading.Thread(target=self._chat.serve_forever, daemon=True).start()
        self._ports = {name: free_port() for name in PORTS}

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

    def up(self) -> str:
        done = self.xray("up", *(f"--{name}-port={port}" for name, port in self._ports.items()))
        assert done.code == 0, done.out + done.err
        exports = [line.removeprefix("export ") for line in done.out.splitlines() if line.startswith("export ")]
        self.variables = dict(line.split("=", 1) for line in exports)
        return done.out

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.xray("status", "--json").out))

    def pids(self) -> dict[str, int]:
        return {name: service["pid"] for name, service in self.status()["services"].items()}

    @property
    def prefect(self) -> str:
        return f"http://127.0.0.1:{self._ports['prefect']}"

    @property
    def mlflow(self) -> str:
        return f"http://127.0.0.1:{self._ports['mlflow']}"

    def ask(self, path: str, body: Any = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        address = f"{self.prefect}/api/{path}"
        request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
        deadline = time.monotonic() + LONG
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.loads(answer.read() or "null")
            except urllib.error.HTTPError as error:
                # Its database is busy: the page asks again too.
                if error.code != 503 or time.monotonic() > deadline:
                    raise
            except TimeoutError:
                reads = method is None and (body is None or path.endswith("/filter"))
                if not reads or time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def start(self, name: str, parameters: dict[str, Any]) -> str:
        deployment = self.ask(f"deployments/name/{name}")["id"]
        return str(self.ask(f"deployments/{deployment}/create_flow_run", {"parameters": parameters})["id"])

    def scheduled(self, name: str, schedule: dict[str, Any]) -> str:
        """Put a deployment on a schedule until it has started a run; returns the run's id."""
        path = f"deployments/{self.ask(f'deployments/name/{name}')['id']}"
        (made,) = self.ask(f"{path}/schedules", [{"active": True, "schedule": schedule}])
        begun = {"type": {"any_": ["PENDING", "RUNNING"]}}
        query = {"flow_runs": {"state": begun}, "deployments": {"id": {"any_": [path.split("/")[1]]}}}
        found: list[dict[str, Any]] = []

        def begins() -> bool:
            found.extend(self.ask("flow_runs/filter", query))
            return bool(found)

        self.until(begins, f"the schedule of {name} starts nothing")
        self.ask(f"{path}/schedules/{made['id']}", method="DELETE")
        return str(found[0]["id"])

    def kill(self, run: str) -> None:
        """SIGKILL to the process of a flow run, as the system does when memory runs out."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("PREFECT__FLOW_RUN_ID") == run and "prefect.engine" in process.cmdline():
                    process.kill()

    def until(self, condition: Callable[[], bool], why: str) -> None:
        wait_until(condition, seconds=LONG, why=why, pause_s=0.5)

    def ended(self, run: str) -> dict[str, Any]:
        final = ("COMPLETED", "FAILED", "CRASHED")
        self.until(lambda: self.ask(f"flow_runs/{run}")["state_type"] in final, f"{run} does not end")
        return dict(self.ask(f"flow_runs/{run}"))

    def asked(self, run: str) -> str | None:
        """What a person is asked before the run goes on, by its key; None where nobody is."""
        key: str | None = self.ask(f"flow_runs/{run}")["state"]["state_details"]["pause_key"]
        return key

    def tasks(self, run: str) -> dict[str, str]:
        found = self.ask("task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
        return {task["name"].split()[0]: task["state_name"] for task in found}

    def computed(self, run: str) -> set[str]:
        """Stages that the run computed: the others were there already."""
        found = self.ask("task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
        return {task["name"].split()[0] for task in found if task["state_name"] != "Cached"}

    def artifacts(self, run: str) -> dict[str, str]:
        found = self.ask("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}})
        return {artifact["key"]: str(artifact["data"]) for artifact in found if artifact["key"]}

    def artifact_keys(self, run: str) -> list[str]:
        found = self.ask("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}})
        return [artifact["key"] for artifact in found]

    def logs(self, run: str) -> list[str]:
        found = self.ask(
            "logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}, "sort": "TIMESTAMP_ASC", "limit": 200}
        )
        return [line["message"] for line in found]

    def artifact_id(self, run: str, key: str) -> str:
        asked = {"artifacts": {"flow_run_id": {"any_": [run]}, "key": {"any_": [key]}}}
        return str(self.ask("artifacts/filter", asked)[-1]["id"])

    def left(self) -> list[str]:
        """Processes that carry a process tag of this server home."""
        tag = json.loads((self.home / "state.json").read_text())["tag"]
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(TAG, "").startswith(tag):
                    found.append(" ".join(process.cmdline())[:80])
            except (psutil.Error, OSError):
                continue
        return found
