"""What a run needs around it when nobody has started it: a Prefect server and a local Ray.

Where PREFECT_API_URL, RAY_ADDRESS or MLFLOW_TRACKING_URI are set, what they name is used instead. Everything binds to
loopback.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PREFECT_START_SECONDS = 120
FLUSH_SECONDS = 5

QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_VERBOSITY": "error",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
}


def quiet_environment() -> None:
    """Telemetry off, third-party chatter off the terminal. Before Prefect, Ray or MLflow are imported."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def services(output: Path) -> Iterator[None]:
    """Prefect and Ray for one run, started at the same time and stopped at the end.

    Raises:
        RuntimeError: the Prefect server did not come up; names its log.
    """
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        # Started from this thread: the server is this run's child.
        server = None
        if not os.environ.get("PREFECT_API_URL"):
            server = stack.enter_context(_prefect_server(output))
        # What the flow will import takes seconds; it loads while the servers start.
        imports = pool.submit(_import_ahead)
        stack.enter_context(_ray())
        imports.result()
        if server is not None:
            _wait_healthy(server, output / "logs" / "prefect-server.log")
        yield


def _import_ahead() -> None:
    import mlflow  # noqa: F401


@contextlib.contextmanager
def _prefect_server(output: Path) -> Iterator[subprocess.Popen[bytes]]:
    home = output / "prefect"
    home.mkdir(parents=True, exist_ok=True)
    (output / "logs").mkdir(exist_ok=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
    os.environ["PREFECT_HOME"] = str(home)
    environment = os.environ | {
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        "PREFECT_UI_ENABLED": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    }
    command = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    with (output / "logs" / "prefect-server.log").open("ab") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield server
    finally:
        _flush_to_server()
        server.terminate()
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        del os.environ["PREFECT_API_URL"]


def _flush_to_server() -> None:
    # Prefect sends logs and events from threads of its own; what comes after the server has gone waits for minutes.
    if "prefect" in sys.modules:
        from prefect.events.worker import EventsWorker
        from prefect.logging.handlers import APILogWorker

        for worker in (APILogWorker, EventsWorker):
            worker.drain_all(timeout=FLUSH_SECONDS)


def _wait_healthy(server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PREFECT_START_SECONDS
    url = os.environ["PREFECT_API_URL"] + "/health"
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.1)
    raise RuntimeError(f"the Prefect server did not come up; see {log}")


@contextlib.contextmanager
def _ray() -> Iterator[None]:
    import ray

    ray.init(
        address=os.environ.get("RAY_ADDRESS"),
        namespace="xray",
        include_dashboard=False if not os.environ.get("RAY_ADDRESS") else None,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        yield
    finally:
        ray.shutdown()
