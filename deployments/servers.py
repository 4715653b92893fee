"""The services of `xray up`: Prefect, MLflow, Ray, and the worker that starts flow runs.

Each process is recorded in the state file as soon as it exists. If `up` is killed before that, the process is found by
its tag.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import shutil
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

from xray.deployments.databases import address
from xray.deployments.local_services import PREFECT_SERVER
from xray.deployments.names import POOL
from xray.deployments.server_home import ServerHome, State, check_free, clients_address
from xray.deployments.service import LOOPBACK, Service, free_port
from xray_runtime.kernel.cores import usable_cores
from xray_runtime.kernel.processes import TAG, kill_tagged
from xray_runtime.kernel.template_database import sqlite_address
from xray_runtime.kernel.tracking.registry import own_store

RAY = "ray"
"""Directory below `ServerHome.ray_sessions` that Ray uses."""
SNAPSHOT_SECONDS = 75.0
"""Time for flow runs to end by themselves: a workspace waits 60 s for its stages' last snapshots."""


def servers(home: ServerHome, state: State) -> list[Service]:
    """Prefect, MLflow and Ray; none needs another to start."""
    local = {name: f"http://{LOOPBACK}:{port}" for name, port in state.ports.items()}
    prefect = f"http://{clients_address(state.host)}:{state.ports['prefect']}"
    mlflow, sessions = home.path / "mlflow", home.ray_sessions(state)
    service = functools.partial(_service, home, state)
    return [
        service(
            "prefect",
            "Prefect",
            PREFECT_SERVER + _options(host=state.host, port=state.ports["prefect"]),
            variables=address("prefect", sqlite_address(home.path / "prefect" / "prefect.db", "sqlite+aiosqlite"))
            | {
                "PREFECT_UI_STATIC_DIRECTORY": str(home.path / "prefect" / "ui"),
                "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
                # Without this, slow answers show an advertisement.
                "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            },
            address=prefect,
            health=f"{prefect}/api/health",
            host=state.host,
            ports=("prefect",),
        ),
        service(
            "mlflow",
            "MLflow",
            _python("mlflow", "server")
            + _options(
                host=LOOPBACK, port=state.ports["mlflow"], workers=1, artifacts_destination=mlflow / "artifacts"
            ),
            variables=address("mlflow", own_store(mlflow)),
            address=local["mlflow"],
            health=f"{local['mlflow']}/health",
            ports=("mlflow",),
        ),
        service(
            "ray",
            "Ray",
            _python("xray.deployments.local_ray", "--head", "--block", "--disable-usage-stats")
            + _options(
                port=state.ports["ray"],
                num_cpus=usable_cores(),
                dashboard_host=LOOPBACK,
                dashboard_port=state.ports["dashboard"],
                # Ray makes this directory readable for everyone; the one above it is closed.
                temp_dir=sessions / RAY,
                # Any free ports: other users may run Ray on this machine too.
                min_worker_port=0,
                max_worker_port=0,
                # Ray requires these. If another program takes one first, the start fails; run `up` again.
                ray_client_server_port=free_port(),
                dashboard_agent_listen_port=free_port(),
            ),
            variables={"RAY_ADDRESS": ""},
            address=local["dashboard"],
            health=f"{local['dashboard']}/api/gcs_healthz",
            ports=("ray", "dashboard"),
            prepare=functools.partial(_prepare_sessions, sessions),
        ),
    ]


def worker_name(state: State) -> str:
    """Prefect's name of the worker of this server home."""
    return f"{socket.gethostname()}-{state.tag[:6]}"


def worker(home: ServerHome, state: State) -> Service:
    """The process that takes flow runs from the work pool and starts a process for each."""
    name = worker_name(state)
    api = home.environment(state)["PREFECT_API_URL"]

    def healthy(since: float) -> bool:
        with contextlib.suppress(OSError, ValueError):
            workers = ask(f"{api}/work_pools/{POOL}/workers/filter", {})
            beats = [datetime.fromisoformat(w["last_heartbeat_time"]) for w in workers if w["name"] == name]
            return any(beat.timestamp() >= since - 1 for beat in beats)
        return False

    return _service(
        home,
        state,
        "worker",
        "worker",
        _python("prefect", "worker", "start") + _options(type="process", pool=POOL, name=name),
        variables={},
        address=f"work pool {POOL}",
        health=healthy,
        # A lifecycle continues without its worker.
        keeps_children=True,
        stop_s=SNAPSHOT_SECONDS,
    )


def start_missing(home: ServerHome, state: State, services: Iterable[Service]) -> list[str]:
    """Start those of `services` that are not running; returns their names.

    Raises:
        ConfigError: another program uses one of the ports; nothing was started.
    """
    missing = [service for service in services if service.find() is None]
    for service in missing:
        if service.tag is not None and not service.keeps_children:
            # Remains of a killed service would hold its port.
            kill_tagged(service.tag, service.stop_s)
    for service in missing:
        for port in service.ports:
            check_free(service.host, f"--{port}-port", state.ports[port])
    for service in missing:
        service.start()
        assert service.record is not None
        state.started[service.name] = service.record
        home.save(state)
    return [service.name for service in missing]


def stop(home: ServerHome, state: State, services: Iterable[Service]) -> list[str]:
    """Stop `services` and their child processes in this order; returns the names of those that ran."""
    ended = []
    for service in services:
        if service.stop():
            ended.append(service.name)
        state.started.pop(service.name, None)
        home.save(state)
    shutil.rmtree(home.ray_sessions(state), ignore_errors=True)
    return ended


def ask(url: str, body: Any = None, patience_s: float = 0.0) -> Any:
    """GET, or POST `body` as JSON; returns the JSON answer. Raises OSError, ValueError.

    Args:
        patience_s: how long to retry while the server is busy or does not answer.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    if user := os.environ.get("PREFECT_API_AUTH_STRING"):
        request.add_header("Authorization", f"Basic {base64.b64encode(user.encode()).decode()}")
    deadline = time.monotonic() + patience_s
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return json.loads(answer.read() or "null")
        except OSError as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code != HTTPStatus.SERVICE_UNAVAILABLE
            if refused or time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def _service(
    home: ServerHome, state: State, name: str, title: str, command: list[str], variables: dict[str, str], **fields: Any
) -> Service:
    """A service of this server home; empty variables are left out of its environment."""
    tag = f"{state.tag}-{name}"
    environment = home.environment(state) | variables | {TAG: tag}
    return Service(
        name,
        title,
        command,
        environment={key: value for key, value in environment.items() if value},
        log=home.log(name),
        cwd=home.path,
        tag=tag,
        record=state.started.get(name),
        **fields,
    )


def _python(*arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments]


def _options(**values: object) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


def _prepare_sessions(folder: Path) -> None:
    """Make a directory that only this user can open, and remove all but the newest Ray session in it."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o700)
    for session in sorted(folder.glob(f"{RAY}/session_2*"))[:-1]:
        shutil.rmtree(session, ignore_errors=True)
