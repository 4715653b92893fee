"""What a run needs around it when nothing of it runs yet: a Prefect server and a local Ray.

Where PREFECT_API_URL, RAY_ADDRESS or MLFLOW_TRACKING_URI are set, what they name is used instead. What is started binds
to loopback, as far as it can, and is guarded by secrets that are made for this run and end with it: on a machine that
others work on too, loopback is theirs as well.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from xray.deployments.local_ray import is_dead, ray_servers, running_ray, temporary_environment
from xray.deployments.service import LOOPBACK, Service, free_port
from xray_runtime.credentials import hide_logins
from xray_runtime.processes import QUIET
from xray_runtime.template_database import copy_template

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.5
RESTARTS, RESTART_SECONDS = 3, 60.0
"""How often the Prefect server is started again in so short a time; then it will not be up any more."""
FLUSH_SECONDS = 5
LOST = 75
"""Exit code of a run that found its Ray dead (EX_TEMPFAIL)."""
PREFECT_SERVER = [
    sys.executable,
    *("-m", "uvicorn", "--factory", "prefect.server.api.server:create_app", "--log-level=warning"),
]


def quiet_environment() -> None:
    """Telemetry off, third-party chatter off the terminal, no password in an address.

    Before Prefect, Ray or MLflow are imported.
    """
    hide_logins()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


class Health:
    """Monitors what a run started: a dead Prefect server is started again, a dead Ray ends the run."""

    def __init__(self) -> None:
        self.lost = False
        """Whether the run failed because Ray had died."""
        self._ray: list[psutil.Process] = []
        self._ended = threading.Event()

    @contextlib.contextmanager
    def watching(self, server: Service | None) -> Iterator[None]:
        """Monitor Ray and the server; when Ray is dead, end the whole process at once (exit code LOST)."""
        # What waits for a dead Ray may wait for ever.
        self._ray = ray_servers()
        thread = threading.Thread(target=self._watch, args=(server,), daemon=True)
        thread.start()
        try:
            yield
        except Exception:
            self.lost = any(map(is_dead, self._ray))
            raise
        finally:
            self._ended.set()
            thread.join()

    def _watch(self, server: Service | None) -> None:
        deaths: list[float] = []
        while not self._ended.wait(WATCH_SECONDS):
            if any(map(is_dead, self._ray)):
                log.error("Ray died")
                os._exit(LOST)
            if server is not None and server.find() is None:
                now = time.monotonic()
                deaths = [*(death for death in deaths if now - death < RESTART_SECONDS), now]
                if len(deaths) > RESTARTS:
                    log.error("the Prefect server died %d times in %.0f s", len(deaths), RESTART_SECONDS)
                    os._exit(LOST)
                log.warning("the Prefect server died; starting it again")
                server.start()


@contextlib.contextmanager
def services(output: Path, health: Health) -> Iterator[None]:
    """Prefect and Ray for one run, monitored by `health`. Before Prefect is imported.

    Raises:
        NotUpError: the Prefect server did not start.
    """
    with (
        _started(output, prefect=not os.environ.get("PREFECT_API_URL"), ray=True) as server,
        health.watching(server),
    ):
        yield


@contextlib.contextmanager
def local_services(output: Path) -> Iterator[None]:
    """Prefect and Ray for a workspace, started where neither this process nor the environment has one.

    Raises:
        NotUpError: the Prefect server did not start.
    """
    from prefect.context import FlowRunContext
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    flow, address = FlowRunContext.get(), PREFECT_API_URL.value()
    ray_runs = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    with _started(output, prefect=flow is None and address is None, ray=not ray_runs) as server:
        settings = {}
        if server is not None:
            # Prefect reads the environment when it is imported, and never again.
            settings = {PREFECT_API_URL: server.environment["PREFECT_API_URL"]}
            settings[PREFECT_API_AUTH_STRING] = server.environment["PREFECT_API_AUTH_STRING"]
        elif address is None and flow is not None:
            # The server that Prefect started for this flow: without its address every worker would start another.
            settings = {PREFECT_API_URL: str(flow.client.api_url)}
        with temporary_settings(settings):
            yield


@contextlib.contextmanager
def prefect_server(output: Path) -> Iterator[None]:
    """The Prefect server of PREFECT_API_URL; where none is named, one of this process's own while it is needed."""
    with _started(output, prefect=not os.environ.get("PREFECT_API_URL"), ray=False):
        yield


@contextlib.contextmanager
def _started(output: Path, *, prefect: bool, ray: bool) -> Iterator[Service | None]:
    """A Prefect server (which is returned) and a Ray, as asked for, started at the same time; stopped at the end."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_prefect(output)) if prefect else None
        threads = stack.enter_context(ThreadPoolExecutor())
        # What the flow will import takes seconds; it loads while the servers start.
        starting: list[Future[Any]] = [threads.submit(importlib.import_module, "mlflow")]
        if server is not None:
            starting.append(threads.submit(server.start))
        if ray:
            stack.enter_context(running_ray())
            _start_stage_process()
        for each in starting:
            each.result()
        if server is not None:
            server.wait_healthy()
        yield server


def _start_stage_process() -> None:
    """Have Ray start the process of the first stage: it imports while the server and the flow start."""
    import ray

    ray.remote(num_cpus=0, max_retries=0)(_import_libraries).remote()


def _import_libraries() -> None:
    for module in ("mlflow", "xray.tasks.stage"):
        importlib.import_module(module)


@contextlib.contextmanager
def _prefect(output: Path) -> Iterator[Service]:
    """A Prefect server of this process's own, not yet started; the environment names it. Stopped at the end."""
    directory, lock = _server_directory(output)
    (output / "logs").mkdir(exist_ok=True)
    port, login = free_port(), f"xray:{secrets.token_hex(32)}"
    variables = {
        "PREFECT_API_URL": f"http://{LOOPBACK}:{port}/api",
        "PREFECT_API_AUTH_STRING": login,
        "PREFECT_SERVER_API_AUTH_STRING": login,
        "PREFECT_HOME": str(directory),
        # No record should lead to a page that is not there.
        "PREFECT_UI_ENABLED": "false",
    }
    with lock, temporary_environment(variables):
        environment = os.environ | {"PREFECT_SERVER_LOGGING_LEVEL": "WARNING"}
        database, make = directory / "prefect.db", functools.partial(_make_prefect_database, environment)
        service = Service(
            name="prefect",
            title="Prefect",
            command=[*PREFECT_SERVER, f"--host={LOOPBACK}", f"--port={port}"],
            environment=environment | _database(database),
            log=output / "logs" / f"{directory.name}-server.log",
            address=variables["PREFECT_API_URL"],
            health=variables["PREFECT_API_URL"] + "/health",
            prepare=functools.partial(copy_template, database, "prefect", make),
        )
        try:
            yield service
        finally:
            _flush_to_server()
            service.stop()


def _database(path: Path) -> dict[str, str]:
    return {"PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{path}"}


def _make_prefect_database(environment: Mapping[str, str], path: Path) -> None:
    others = {name: value for name, value in environment.items() if not name.startswith("PREFECT_")}
    subprocess.run(
        [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"],
        env=others | QUIET | _database(path) | {"PREFECT_HOME": str(path.parent)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )


def _server_directory(output: Path) -> tuple[Path, contextlib.AbstractContextManager[FileLock]]:
    """A directory for a server's database that no other run in `output` uses at the moment, and its lock, held."""
    number = 1
    while True:
        directory = output / ("prefect" if number == 1 else f"prefect-{number}")
        directory.mkdir(parents=True, exist_ok=True)
        try:
            return directory, FileLock(directory / "lock").acquire(timeout=0)
        except Timeout:
            number += 1


def _flush_to_server() -> None:
    # Prefect sends logs and events from threads of its own; what comes after the server has gone waits for minutes.
    if "prefect" in sys.modules:
        from prefect.events.worker import EventsWorker
        from prefect.logging.handlers import APILogWorker

        # In a thread of its own: beside a running event loop, as a notebook has one, Prefect would not wait.
        with ThreadPoolExecutor(1) as thread:
            for worker in (APILogWorker, EventsWorker):
                thread.submit(worker.drain_all, timeout=FLUSH_SECONDS).result()
