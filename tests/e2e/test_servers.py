"""A tracking server that goes away in mid-stage delays the run, and every point arrives later."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, XRAY, environment

pytestmark = pytest.mark.e2e

AWAY_SECONDS = 20


def _serve(directory: Path, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{directory / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(directory / "artifacts")]
    with (directory / "server.log").open("ab") as log:
        server = subprocess.Popen(command, env=environment(), stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
            return server
        except OSError:
            time.sleep(0.3)
    raise TimeoutError("MLflow did not come up")


def _kill(server: subprocess.Popen[bytes]) -> None:
    # The server has children of its own.
    subprocess.run(["pkill", "-KILL", "-s", str(server.pid)], check=False)
    server.wait()


@pytest.mark.timeout(900)
def test_a_tracking_server_may_go_away_for_a_while(tmp_path: Path) -> None:
    import mlflow

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    server = _serve(tmp_path, port)
    output = tmp_path / "run"
    run = subprocess.Popen(
        [XRAY, "run", "configs/tiny.yaml", "--output", str(output), "--set", "runtime.snapshot_every=1"],
        cwd=ROOT,
        env=environment() | {"MLFLOW_TRACKING_URI": uri},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + 400
        while not (output / "logs" / "ppo-1" / "policy-0.log").exists():
            assert run.poll() is None, run.stdout.read().decode() if run.stdout else ""
            assert time.monotonic() < deadline
            time.sleep(0.1)
        _kill(server)
        time.sleep(AWAY_SECONDS)
        assert run.poll() is None
        server = _serve(tmp_path, port)
        printed, _ = run.communicate(timeout=400)
        assert run.returncode == 0, printed.decode()
        content = json.loads((output / "lifecycle.json").read_text())
        client = mlflow.MlflowClient(tracking_uri=uri)
        ppo = next(stage for stage in content["stages"] if stage["name"] == "ppo-1")
        assert [m.step for m in client.get_metric_history(ppo["mlflow_run_id"], "reward/mean")] == [0, 1, 2, 3]
        assert client.get_run(ppo["mlflow_run_id"]).info.status == "FINISHED"
        assert ppo["attempts"] == 1
    finally:
        run.kill()
        _kill(server)
