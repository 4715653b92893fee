"""The services `xray up` runs: how each is started, when it is healthy, how it is ended.

Each is a process in a session of its own, so that it outlives `up`, and carries a mark that its descendants inherit. It
is remembered by its process id and start time before anything else happens; what a killed `up` had no time to
remember is found by the mark. Nothing is ever found by name.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from xray.deployments.databases import address
from xray.deployments.server_home import LOOPBACK, ProcessRecord, ServerHome, State, check_free, clients_address
from xray_runtime.planning.workload import usable_cores
from xray_runtime.processes import MARK, kill_tagged, tagged

POOL = "xray"
RAY = "ray"
"""Below `Home.ray_sessions`, where Ray keeps them."""
START_SECONDS = 240.0
"""A service that is not healthy after this has failed to start."""
STOP_SECONDS = 8.0
SNAPSHOT_SECONDS = 60.0
"""Flow runs at work get this long for a last snapshot."""
SAY_SECONDS = 20.0
POLL_SECONDS = 0.3
LOG_LINES = 12


class NotUpError(RuntimeError):
    """A service did not come up; the message has the end of its log."""


@dataclass(frozen=True)
class Service:
    """One of them.

    Attributes:
        host: what its ports are on.
        ports: names of the ports (`home.PORTS`) that must be free before it starts.
        healthy: whether it does its work, given the time its process started.
        keeps_children: what it started goes on without it.
    """

    name: str
    title: str
    command: list[str]
    address: str
    healthy: Callable[[float], bool]
    variables: dict[str, str]
    host: str = LOOPBACK
    ports: tuple[str, ...] = ()
    keeps_children: bool = False

    def mark(self, state: State) -> str:
        return f"{state.mark}-{self.name}"


def servers(home: ServerHome, state: State) -> list[Service]:
    """Prefect, MLflow and Ray; none needs another to start."""
    local = {name: f"http://{LOOPBACK}:{port}" for name, port in state.ports.items()}
    prefect = f"http://{clients_address(state.host)}:{state.ports['prefect']}"
    return [
        Service(
            "prefect",
            "Prefect",
            _python("uvicorn", "--factory", "prefect.server.api.server:create_app", "--log-level", "warning")
            + _options(host=state.host, port=state.ports["prefect"]),
            prefect,
            lambda _: answers(f"{prefect}/api/health"),
            address("prefect", f"sqlite+aiosqlite:///{home.path / 'prefect' / 'prefect.db'}")
            | {
                "PREFECT_UI_STATIC_DIRECTORY": str(home.path / "prefect" / "ui"),
                "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
                # It would answer a slow moment with an advertisement.
                "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            },
            host=state.host,
            ports=("prefect",),
        ),
        Service(
            "mlflow",
            "MLflow",
            _python("mlflow", "server")
            + _options(
                host=LOOPBACK,
                port=state.ports["mlflow"],
                workers=1,
                artifacts_destination=home.path / "mlflow" / "artifacts",
            ),
            local["mlflow"],
            lambda _: answers(f"{local['mlflow']}/health"),
            address("mlflow", f"sqlite:///{home.path / 'mlflow' / 'mlflow.db'}"),
            ports=("mlflow",),
        ),
        Service(
            "ray",
            "Ray",
            _python("ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats")
            + _options(
                port=state.ports["ray"],
                num_cpus=usable_cores(),
                dashboard_host=LOOPBACK,
                dashboard_port=state.ports["dashboard"],
                # Ray opens this directory to everybody; the one above it keeps them out.
                temp_dir=home.ray_sessions(state) / RAY,
                # Any free ones: others may have a Ray on this machine too.
                min_worker_port=0,
                max_worker_port=0,
            ),
            local["dashboard"],
            lambda _: answers(f"{local['dashboard']}/api/gcs_healthz"),
            {"RAY_ADDRESS": ""},
            ports=("ray", "dashboard"),
        ),
    ]


def worker(home: ServerHome, state: State) -> Service:
    """What takes flow runs from the work pool and starts their processes."""
    name = f"{socket.gethostname()}-{state.mark[:6]}"
    api = home.environment(state)["PREFECT_API_URL"]

    def healthy(since: float) -> bool:
        with contextlib.suppress(OSError, ValueError):
            found = ask(f"{api}/work_pools/{POOL}/workers/filter", {})
            return any(w["name"] == name and _seconds(w["last_heartbeat_time"]) >= since - 1 for w in found)
        return False

    command = _python("prefect", "worker", "start") + _options(type="process", pool=POOL, name=name)
    # A lifecycle whose worker died goes on, and the next worker need not know of it.
    return Service("worker", "worker", command, f"work pool {POOL}", healthy, {}, keeps_children=True)


def find(service: Service, state: State) -> psutil.Process | None:
    """The service's process, where it runs."""
    started = state.started.get(service.name)
    return started.find() if started is not None else None


def start_missing(home: ServerHome, state: State, services: Iterable[Service]) -> list[str]:
    """Start each of `services` that does not run; returns the names of those.

    Raises:
        ConfigError: a port is somebody else's; nothing was started then.
    """
    missing = [service for service in services if find(service, state) is None]
    for service in missing:
        if not service.keeps_children:
            # What is left of one that was killed holds its port.
            kill_tagged(service.mark(state), STOP_SECONDS)
    for service in missing:
        for port in service.ports:
            check_free(service.host, port, state.ports[port])
    for service in missing:
        _start(home, state, service)
    return [service.name for service in missing]


def _start(home: ServerHome, state: State, service: Service) -> None:
    extra: list[str] = []
    if service.name == "ray":
        _make_room(home.ray_sessions(state))
        # Ports Ray insists on; one that somebody takes in between fails the start, and `up` can be repeated.
        extra = _options(ray_client_server_port=_free_port(), dashboard_agent_listen_port=_free_port())
    variables = home.environment(state) | service.variables | {MARK: service.mark(state)}
    with home.log(service.name).open("ab") as log:
        process = subprocess.Popen(
            service.command + extra,
            cwd=home.path,
            env={name: value for name, value in variables.items() if value},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    state.started[service.name] = ProcessRecord(pid=process.pid, created=psutil.Process(process.pid).create_time())
    home.save(state)


def wait_healthy(home: ServerHome, state: State, services: Iterable[Service], say: Callable[[str], None]) -> None:
    """Until each of `services` does its work; `say` hears of each.

    Raises:
        NotUpError: one ended, or START_SECONDS went by.
    """
    waiting = list(services)
    begin = spoken = time.monotonic()
    while waiting:
        for service in list(waiting):
            process = find(service, state)
            if process is None:
                raise NotUpError(f"{service.title} ended as soon as it was started. {end_of(home.log(service.name))}")
            if service.healthy(state.started[service.name].created):
                waiting.remove(service)
                say(f"{service.title:8} {service.address}")
        names = ", ".join(service.title for service in waiting)
        now = time.monotonic()
        if waiting and now - begin > START_SECONDS:
            first = waiting[0]
            raise NotUpError(
                f"{names}: no answer after {START_SECONDS:.0f} s; `xray down` and `xray up` start anew. "
                f"{end_of(home.log(first.name))}"
            )
        if waiting and now - spoken > SAY_SECONDS:
            spoken = now
            say(f"still waiting for {names} ({now - begin:.0f} s)")
        time.sleep(POLL_SECONDS if waiting else 0)


def stop(home: ServerHome, state: State, services: Iterable[Service]) -> list[str]:
    """End each of `services` with all it started, in this order; returns the names of those that ran."""
    ended = []
    for service in services:
        mark = service.mark(state)
        if tagged(mark):
            ended.append(service.name)
            kill_tagged(mark, SNAPSHOT_SECONDS if service.keeps_children else STOP_SECONDS)
        state.started.pop(service.name, None)
        home.save(state)
    shutil.rmtree(home.ray_sessions(state), ignore_errors=True)
    return ended


def answers(url: str) -> bool:
    """Whether a page is there."""
    with contextlib.suppress(OSError, ValueError):
        urllib.request.urlopen(url, timeout=3).close()
        return True
    return False


def ask(url: str, body: Any = None) -> Any:
    """The JSON a server answers; with a body, to a POST. Raises OSError, ValueError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    if user := os.environ.get("PREFECT_API_AUTH_STRING"):
        request.add_header("Authorization", f"Basic {base64.b64encode(user.encode()).decode()}")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def end_of(log: Path) -> str:
    """The last lines of a log, and where it lies."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
    return "\n".join([f"The end of {log}:", *(f"  {line}" for line in lines)])


def _python(*arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments]


def _options(**values: object) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


def _make_room(folder: Path) -> None:
    """For a new session, for this user alone; of those before, only the last one's logs are kept."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o700)
    for session in sorted(folder.glob(f"{RAY}/session_2*"))[:-1]:
        shutil.rmtree(session, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind((LOOPBACK, 0))
        port: int = s.getsockname()[1]
        return port


def _seconds(time_text: str) -> float:
    return datetime.fromisoformat(time_text).timestamp()
