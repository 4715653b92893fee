"""Servers of the user's own, behind passwords: they may go away in mid-stage, and no secret is found anywhere after."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, XRAY, environment
from tests.e2e.secrets import OTHERS, SECRETS, environments, places_of
from tests.waiting import wait_until
from xray.deployments.service import free_port

pytestmark = pytest.mark.long

AWAY_SECONDS = 20
LOGIN = {name: f"xray:{SECRETS[name]}" for name in ("mlflow", "prefect")}


class Server:
    """A server of the user's own, in a session of its own."""

    def __init__(self, name: str, directory: Path, command: list[str], variables: dict[str, str]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._health = f"{self.url}/api/health" if name == "prefect" else f"{self.url}/health"
        self._log = directory / f"{name}.log"
        self._command = [sys.executable, "-m", *command, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
        self._environment = environment() | variables
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(self._health, timeout=2).close()
                return
            except OSError:
                time.sleep(0.3)
        raise TimeoutError(f"{self._health} did not answer; see {self._log}")

    def kill(self) -> None:
        # It may have children of its own.
        subprocess.run(["pkill", "-KILL", "-s", str(self._process.pid)], check=False)
        self._process.wait()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[dict[str, Server]]:
    mlflow = ["mlflow", "server", "--backend-store-uri", f"sqlite:///{tmp_path / 'mlflow.db'}"]
    mlflow += ["--artifacts-destination", str(tmp_path / "artifacts")]
    prefect = ["uvicorn", "--factory", "prefect.server.api.server:create_app"]
    variables = {
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{tmp_path / 'prefect.db'}",
        "PREFECT_SERVER_API_AUTH_STRING": LOGIN["prefect"],
    }
    found = {
        "mlflow": Server("mlflow", tmp_path, mlflow, {}),
        "prefect": Server("prefect", tmp_path, prefect, variables),
    }
    yield found
    for server in found.values():
        server.kill()


@pytest.mark.timeout(900)
def test_servers_may_go_away_for_a_while(servers: dict[str, Server], tmp_path: Path) -> None:
    import mlflow

    uri, api = servers["mlflow"].url, f"{servers['prefect'].url}/api"
    output = tmp_path / "run"
    # As people write them: with the login in the address. MLflow's server takes anybody's.
    addresses = {
        "MLFLOW_TRACKING_URI": uri.replace("://", f"://{LOGIN['mlflow']}@"),
        "PREFECT_API_URL": api.replace("://", f"://{LOGIN['prefect']}@"),
    }
    with (tmp_path / "run.log").open("wb") as log:
        run = subprocess.Popen(
            [XRAY, "run", "configs/tiny.yaml", "--output", str(output), "--set", "runtime.snapshot_every=1"],
            cwd=ROOT,
            env=environment() | OTHERS | addresses,
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(
            (output / "logs" / "ppo-1" / "policy-0.log").exists, seconds=400, process=run, why=tmp_path / "run.log"
        )
        secrets = _look_at(run.pid)
        for server in servers.values():
            server.kill()
        time.sleep(AWAY_SECONDS)
        assert run.poll() is None
        for server in servers.values():
            server.start()
        assert run.wait(400) == 0, (tmp_path / "run.log").read_text()
    finally:
        run.kill()
    content = json.loads((output / "lifecycle.json").read_text())
    ppo = next(stage for stage in content["stages"] if stage["name"] == "ppo-1")
    assert ppo["attempts"] == 1
    client = mlflow.MlflowClient(tracking_uri=uri)
    assert [m.step for m in client.get_metric_history(ppo["mlflow_run_id"], "reward/mean")] == [0, 1, 2, 3]
    assert client.get_run(ppo["mlflow_run_id"]).info.status == "FINISHED"
    # Prefect tells the truth afterwards too.
    states = {kind: _states(api, kind) for kind in ("flow_runs", "task_runs")}
    tasks = len(content["stages"]) + 1  # the policy's registration
    assert states == {"flow_runs": ["COMPLETED"], "task_runs": ["COMPLETED"] * tasks}

    # Records, logs, results, both databases, artifacts, what was printed.
    assert places_of(secrets, tmp_path) == []
    assert (output / "keys").stat().st_mode & 0o777 == 0o700
    assert (output / "keys" / "signing.pem").stat().st_mode & 0o777 == 0o600


def _look_at(run: int) -> set[str]:
    """A run at work: no secret on a command line, nor in what Ray writes. Returns all of them, its Ray's token too."""
    processes = environments(run)
    assert len(processes) > 5
    tokens, places = ({e[name] for _, e in processes if name in e} for name in ("RAY_AUTH_TOKEN", "RAY_TMPDIR"))
    assert (len(tokens), len(places)) == (1, 1)
    secrets = set(SECRETS.values()) | tokens
    assert [line for line, _ in processes if any(secret in line for secret in secrets)] == []
    place = Path(places.pop())
    assert place.stat().st_mode & 0o777 == 0o700
    assert places_of(secrets, place) == []
    return secrets


def _states(api: str, kind: str) -> list[str]:
    request = urllib.request.Request(f"{api}/{kind}/filter", b"{}", {"Content-Type": "application/json"})
    request.add_header("Authorization", f"Basic {base64.b64encode(LOGIN['prefect'].encode()).decode()}")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return [run["state_type"] for run in json.load(answer)]
