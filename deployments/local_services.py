"""What a run needs around it when nobody has started it: a Prefect server and a local Ray.

Where PREFECT_API_URL, RAY_ADDRESS or MLFLOW_TRACKING_URI are set, what they name is used instead. What is started binds
to loopback, as far as it can, and is guarded by secrets that are made for this run and end with it: on a machine that
others work on too, loopback is theirs as well.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from xray_runtime.credentials import hide_logins
from xray_runtime.planning.workload import usable_cores
from xray_runtime.processes import QUIET

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.5
PREFECT_START_SECONDS = 120
RAY_STARTS = 3
FLUSH_SECONDS = 5
LOST = 75
"""Exit code of a run that found its Ray or its Prefect server dead (EX_TEMPFAIL)."""


def quiet_environment() -> None:
    """Telemetry off, third-party chatter off the terminal, no password in an address.

    Before Prefect, Ray or MLflow are imported.
    """
    hide_logins()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


class Health:
    """Looks after what a run started: a dead Prefect server is started again, a dead Ray ends the run."""

    def __init__(self) -> None:
        self.lost = False
        """Whether the run failed because Ray had died."""
        self._ray: list[psutil.Process] = []
        self._ended = threading.Event()

    def _ray_is_dead(self) -> bool:
        return any(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in self._ray)

    @contextlib.contextmanager
    def watching(self, server: PrefectServer | None) -> Iterator[None]:
        """Look after the server, and end the whole process at once (exit code LOST) when Ray is dead."""
        # What waits for a dead Ray may wait for ever.
        self._ray = [p for p in psutil.Process().children(recursive=True) if p.name() in ("raylet", "gcs_server")]
        thread = threading.Thread(target=self._health, args=(server,), daemon=True)
        thread.start()
        try:
            yield
        except Exception:
            self.lost = self._ray_is_dead()
            raise
        finally:
            self._ended.set()
            thread.join()

    def _health(self, server: PrefectServer | None) -> None:
        while not self._ended.wait(WATCH_SECONDS):
            if self._ray_is_dead():
                log.error("Ray died")
                os._exit(LOST)
            if server is not None and server.process.poll() is not None:
                log.warning("the Prefect server died; starting it again")
                server.start()


@contextlib.contextmanager
def services(output: Path, health: Health) -> Iterator[None]:
    """Prefect and Ray for one run, started at the same time and stopped at the end.

    Raises:
        RuntimeError: the Prefect server did not come up; names its log.
    """
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        # Started from this thread: the server is this run's child.
        server = None
        if not os.environ.get("PREFECT_API_URL"):
            server = PrefectServer(output)
            stack.callback(server.stop)
        # What the flow will import takes seconds; it loads while the servers start.
        imports = pool.submit(_import_ahead)
        stack.enter_context(running_ray())
        imports.result()
        if server is not None:
            server.wait_healthy()
        with health.watching(server):
            yield


@contextlib.contextmanager
def local_services(output: Path) -> Iterator[None]:
    """Prefect and Ray for a workspace, started where neither this process nor the environment has one."""
    from prefect.context import FlowRunContext
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    with contextlib.ExitStack() as stack:
        flow = FlowRunContext.get()
        if flow is not None and PREFECT_API_URL.value() is None:
            # The server that Prefect started for this flow: without its address every worker would start another.
            stack.enter_context(temporary_settings({PREFECT_API_URL: str(flow.client.api_url)}))
        elif PREFECT_API_URL.value() is None:
            server = PrefectServer(output)
            stack.callback(server.stop)
            server.wait_healthy()
            # Prefect reads the environment when it is imported, and never again.
            told = {PREFECT_API_URL: server.url, PREFECT_API_AUTH_STRING: server.login}
            stack.enter_context(temporary_settings(told))
        import ray

        if not ray.is_initialized():
            stack.enter_context(running_ray())
        yield


def _import_ahead() -> None:
    import mlflow  # noqa: F401


@contextlib.contextmanager
def prefect_server(output: Path) -> Iterator[None]:
    """The Prefect server of PREFECT_API_URL; where none is named, one of this process's own while it is needed."""
    if os.environ.get("PREFECT_API_URL"):
        yield
        return
    server = PrefectServer(output)
    try:
        server.wait_healthy()
        yield
    finally:
        server.stop()


class PrefectServer:
    """A Prefect server of this run's own, on loopback, its database under the output directory."""

    def __init__(self, output: Path) -> None:
        self._home, self._lock = _free_home(output)
        self._log = output / "logs" / f"{self._home.name}-server.log"
        self._log.parent.mkdir(exist_ok=True)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self._port = s.getsockname()[1]
        self.url, self.login = f"http://127.0.0.1:{self._port}/api", f"xray:{secrets.token_hex(32)}"
        self._variables = {
            "PREFECT_API_URL": self.url,
            "PREFECT_API_AUTH_STRING": self.login,
            "PREFECT_SERVER_API_AUTH_STRING": self.login,
            "PREFECT_HOME": str(self._home),
            # No record should lead to a page that is not there.
            "PREFECT_UI_ENABLED": "false",
        }
        os.environ |= self._variables
        self.start()

    def start(self) -> None:
        """Start it, or start it again where it was."""
        environment = os.environ | {
            "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{self._home / 'prefect.db'}",
            "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        }
        command = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--log-level", "warning"]
        with self._log.open("ab") as log_file:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log_file, stderr=log_file, start_new_session=True
            )

    def wait_healthy(self) -> None:
        """Raises RuntimeError where it does not come up."""
        deadline = time.monotonic() + PREFECT_START_SECONDS
        url = self.url + "/health"
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
                return
            time.sleep(0.1)
        raise RuntimeError(f"the Prefect server did not come up; see {self._log}")

    def stop(self) -> None:
        """End it, after what this process still has to tell it."""
        _flush_to_server()
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._lock.release()
        for name in self._variables:
            del os.environ[name]


def _free_home(output: Path) -> tuple[Path, FileLock]:
    """A directory for a server's database that no other run in `output` uses at the moment, and its lock."""
    number = 1
    while True:
        home = output / ("prefect" if number == 1 else f"prefect-{number}")
        home.mkdir(parents=True, exist_ok=True)
        lock = FileLock(home / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            number += 1
        else:
            return home, lock


def _flush_to_server() -> None:
    # Prefect sends logs and events from threads of its own; what comes after the server has gone waits for minutes.
    if "prefect" in sys.modules:
        from prefect.events.worker import EventsWorker
        from prefect.logging.handlers import APILogWorker

        for worker in (APILogWorker, EventsWorker):
            worker.drain_all(timeout=FLUSH_SECONDS)


@contextlib.contextmanager
def private_ray() -> Iterator[None]:
    """Where this process starts a Ray of its own: a fresh token, and sockets and logs that only this user can reach.

    Before Ray is imported. By itself Ray has one token for all a user's runs, and opens its directories to everybody,
    also one it is given: only what is above that one can keep others out.
    """
    if os.environ.get("RAY_ADDRESS"):
        yield
        return
    place = tempfile.mkdtemp(prefix="xray-")
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": place}
    yield
    # Of a run that failed they stay, for whoever looks for the reason.
    shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def running_ray() -> Iterator[None]:
    """This process connected to the Ray of RAY_ADDRESS; where none is named, to a private one of its own."""
    with private_ray(), _connected():
        yield


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    import ray

    address = os.environ.get("RAY_ADDRESS")
    for attempt in range(1 if address else RAY_STARTS):
        try:
            ray.init(
                address=address,
                namespace="xray",
                include_dashboard=None if address else False,
                num_cpus=None if address else usable_cores(),
                log_to_driver=False,
                logging_level="ERROR",
            )
            break
        except Exception as error:
            # Ray gives a new node half a minute, which a busy machine does not always keep.
            ray.shutdown()
            if "timed out during startup" not in str(error) or attempt + 1 == RAY_STARTS:
                raise
            log.warning("Ray did not start in time; starting it again")
    try:
        yield
    finally:
        ray.shutdown()
