"""The services of a single run: a Prefect server and a local Ray, unless PREFECT_API_URL and RAY_ADDRESS name others.

They bind to loopback where they can, and demand secrets that are made for this run, since other users of the machine
can reach loopback too.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import certifi
import psutil
from filelock import FileLock, Timeout

from xray.deployments.local_ray import (
    connected_ray,
    is_dead,
    ray_environment,
    ray_servers,
    temporary_environment,
)
from xray.deployments.patience import LOST
from xray.deployments.service import LOOPBACK, Service, free_port
from xray.tasks.command import is_commanded
from xray_runtime.cluster.pool.libraries import NEEDLESS, STAGE, worker_options
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.hidden_libraries import hidden
from xray_runtime.kernel.network import check_addresses
from xray_runtime.kernel.processes import QUIET, without_collection
from xray_runtime.kernel.template_database import copy_template, sqlite_address
from xray_runtime.kernel.tracking.registry import store_module

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.5
RESTARTS, RESTART_SECONDS = 3, 60.0
"""Maximum restarts of the Prefect server within this many seconds; after more, the run fails."""
FLUSH_SECONDS = 5
PREFECT_SERVER = [
    sys.executable,
    *("-m", "xray.deployments.prefect_api", "--factory", "prefect.server.api.server:create_app", "--log-level=warning"),
]

OF_ONE_RUN = {
    # Block types of a hundred integrations, written before the server answers: saving a block registers its own.
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    # To remember what it registered, it would import those integrations.
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
    # Nothing is deployed on such a server, and no worker asks it.
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_FOREMAN_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    # Its threads hardly work at the same time; each would keep memory of its own.
    "MALLOC_ARENA_MAX": "1",
}
"""Settings of a Prefect server that only one run uses."""


class Health:
    """Monitors the services of a run: restarts a dead Prefect server, ends the run when Ray is dead."""

    def __init__(self) -> None:
        self.lost = False
        """Whether the run failed because Ray had died."""
        self._ray: list[psutil.Process] = []
        self._ended = threading.Event()

    @contextlib.contextmanager
    def watching(self, server: Service | None) -> Iterator[None]:
        """Monitor Ray and the server; when Ray is dead, end this process at once (exit code LOST)."""
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
                log.warning("the Prefect server died; restarting it")
                server.start()


@contextlib.contextmanager
def services(output: Path, health: Health, *modules: str) -> Iterator[None]:
    """Prefect and Ray for one run, monitored by `health`. To be entered before Prefect is imported.

    Args:
        modules: imported while the servers start.

    Raises:
        NotUpError: the Prefect server did not start.
    """
    prefect = not os.environ.get("PREFECT_API_URL")
    with _started(output, prefect=prefect, ray=True, modules=modules) as server, health.watching(server):
        # The collector else looks at all that was imported, for half a second each time.
        gc.freeze()
        yield


@contextlib.contextmanager
def local_services(output: Path) -> Iterator[None]:
    """Prefect and Ray for a workspace; started unless this process or the environment already has them.

    Raises:
        NotUpError: the Prefect server did not start.
        ConfigError: a server that the environment names does not answer.
    """
    from prefect.context import FlowRunContext
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    # Prefect's own address may also come from a profile.
    flow, address = FlowRunContext.get(), PREFECT_API_URL.value()
    if not is_commanded():
        check_addresses(os.environ | {"PREFECT_API_URL": address if address is not None and flow is None else ""})
    ray_runs = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    with _started(output, prefect=flow is None and address is None, ray=not ray_runs) as server:
        settings = {}
        if server is not None:
            # Prefect only reads the environment when it is imported.
            settings = {PREFECT_API_URL: server.environment["PREFECT_API_URL"]}
            settings[PREFECT_API_AUTH_STRING] = server.environment["PREFECT_API_AUTH_STRING"]
        elif address is None and flow is not None:
            # Without the address of the flow's temporary server, every worker would start another one.
            settings = {PREFECT_API_URL: str(flow.client.api_url)}
        with temporary_settings(settings):
            yield


@contextlib.contextmanager
def prefect_server(output: Path) -> Iterator[None]:
    """The Prefect server of PREFECT_API_URL, or one that this process starts for as long as the context lasts."""
    with _started(output, prefect=not os.environ.get("PREFECT_API_URL"), ray=False):
        yield


@contextlib.contextmanager
def _started(output: Path, *, prefect: bool, ray: bool, modules: Sequence[str] = ()) -> Iterator[Service | None]:
    """Start a Prefect server (yielded) and a Ray at the same time, and stop them at the end."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_prefect(output)) if prefect else None
        # After the server, which must not inherit Ray's environment.
        forks = stack.enter_context(ray_environment()) if ray else None
        if forks is not None:
            forks.load()
        # In the process of `xray run` alone: other threads of a script may import them meanwhile.
        with without_collection(), hidden(*(NEEDLESS if modules else ())):
            threads = stack.enter_context(ThreadPoolExecutor())
            starting: list[Future[Any]] = []
            if server is not None:
                starting.append(threads.submit(server.start))
            # The flow's imports take seconds; they load while the servers start.
            if ray:
                # Not in two threads at the same time.
                importlib.import_module("ray")
            starting.append(threads.submit(_import, (store_module(), *modules)))
            if ray:
                stack.enter_context(connected_ray(forks))
                _start_stage_process()
            for each in starting:
                each.result()
            if server is not None:
                server.wait_healthy()
        yield server


def _import(modules: Iterable[str]) -> None:
    for module in modules:
        importlib.import_module(module)


def _start_stage_process() -> None:
    """Have Ray start the process of the first stage.

    Where a stage begins before it has started, the stage gets this process or another one, whichever starts first. So
    this one imports nothing more: both would do the same work.
    """
    import ray

    ray.remote(num_cpus=0, max_retries=0, **worker_options(STAGE))(_do_nothing).remote()


def _do_nothing() -> None:
    pass


@contextlib.contextmanager
def _prefect(output: Path) -> Iterator[Service]:
    """A Prefect server that is not started yet; the environment names it. It is stopped at the end."""
    directory, lock = _server_directory(output)
    (output / "logs").mkdir(exist_ok=True)
    port, login = free_port(), f"xray:{secrets.token_hex(32)}"
    variables = {
        "PREFECT_API_URL": f"http://{LOOPBACK}:{port}/api",
        "PREFECT_API_AUTH_STRING": login,
        "PREFECT_SERVER_API_AUTH_STRING": login,
        "PREFECT_HOME": str(directory),
        "PREFECT_API_SSL_CERT_FILE": str(_one_authority(directory)),
        # Records must not link to pages that will be gone.
        "PREFECT_UI_ENABLED": "false",
    }
    with lock, temporary_environment(variables):
        environment = OF_ONE_RUN | os.environ | {"PREFECT_SERVER_LOGGING_LEVEL": "WARNING"}
        database, make = directory / "prefect.db", functools.partial(make_prefect_database, environment)
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


def _one_authority(directory: Path) -> Path:
    """A file with one certificate authority, for clients of a server that is reached without TLS.

    Every client of Prefect, of which a stage has several, reads its authorities: all that are usual take 45 ms.
    """
    text, end = Path(certifi.where()).read_text(encoding="utf-8"), "-----END CERTIFICATE-----\n"
    path = directory / "authority.pem"
    write_atomic(path, text[text.index("-----BEGIN") : text.index(end) + len(end)].encode())
    return path


def _database(path: Path) -> dict[str, str]:
    return {"PREFECT_API_DATABASE_CONNECTION_URL": sqlite_address(path, "sqlite+aiosqlite")}


def make_prefect_database(environment: Mapping[str, str], path: Path) -> None:
    """Make an empty database of the installed Prefect at `path`."""
    others = {name: value for name, value in environment.items() if not name.startswith("PREFECT_")}
    subprocess.run(
        [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"],
        env=others | QUIET | _database(path) | {"PREFECT_HOME": str(path.parent)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )


def _server_directory(output: Path) -> tuple[Path, contextlib.AbstractContextManager[FileLock]]:
    """A directory for a server's database that no other run in `output` is using, and its lock, held."""
    number = 1
    while True:
        directory = output / ("prefect" if number == 1 else f"prefect-{number}")
        directory.mkdir(parents=True, exist_ok=True)
        try:
            return directory, FileLock(directory / "lock").acquire(timeout=0)
        except Timeout:
            number += 1


def _flush_to_server() -> None:
    # Prefect's threads for logs and events would wait for minutes after the server is gone.
    if "prefect" in sys.modules:
        from prefect.events.worker import EventsWorker
        from prefect.logging.handlers import APILogWorker

        # In a thread: with a running event loop, as in a notebook, Prefect would not wait.
        with ThreadPoolExecutor(1) as thread:
            for worker in (APILogWorker, EventsWorker):
                thread.submit(worker.drain_all, timeout=FLUSH_SECONDS).result()
