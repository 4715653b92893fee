"""A private Ray for this process, or the one of RAY_ADDRESS.

A private Ray has a token of its own, and its sockets and logs are only accessible to this user. It starts without
autoscaler, dashboard and log collector, which one machine does not need. Ray gives its processes half a minute to
start, which is too short on a busy machine; here they may take as long as they live and make progress.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from xray.deployments.fork_server import ForkServer, fork_server
from xray.deployments.patience import NotUpError, Patience, end_of
from xray.deployments.service import free_port
from xray_runtime.cluster.pool.libraries import FORK_SERVER
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.cores import usable_cores
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.processes import GRACE_SECONDS, kill

log = logging.getLogger(__name__)

SERVERS = ("gcs_server", "raylet")
"""Ray's own processes. Ray is dead when one of them is."""
SIGNS = (" C ", " E ")
"""Marks of a failed check or an error in their logs."""
NEEDLESS = ("start_monitor", "start_api_server", "start_log_monitor")
"""Methods of `ray._private.node.Node` that start the autoscaler, the dashboard and the log collector."""
AGENT, WORKERS = "--dashboard_agent_command=", "--python_worker_command="
PRESTART = "--num_prestart_python_workers="
"""Arguments of a raylet: the dashboard's agent, needless on a single machine, and how and when workers start."""
IDLE = ["sh", "-c", "exec tail --pid=$PPID -f /dev/null"]
"""Replaces that agent, without which a raylet does not start: it does nothing and ends with the raylet."""
LONG_SECONDS = 3600
PATIENT = {
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(LONG_SECONDS),
    "RAY_agent_register_timeout_ms": str(LONG_SECONDS * 1000),
    "RAY_worker_register_timeout_seconds": str(LONG_SECONDS),
}
"""Time limits of Ray's servers for each other."""
ALONE = {
    # By default Ray would give a machine up after five times 10 seconds without an answer.
    "RAY_health_check_timeout_ms": "60000",
    # It would keep as many idle workers as there are free CPUs: one of a stage holds 136 MiB that nobody uses.
    "RAY_num_workers_soft_limit": "0",
    # The first stage's process waits for seconds until that stage is submitted.
    "RAY_idle_worker_killing_time_threshold_ms": "10000",
    # Each call of an actor would be recorded, in the GCS, for the dashboard.
    "RAY_task_events_report_interval_ms": "0",
}
"""For a single machine."""
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
"""Ray's port parameters. A raylet dies if its agents do not report these within 15 seconds, so they are chosen before
either starts."""
MAX_PARENT_BYTES = 107 - len("/xray-12345678/ray/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""Longest path above Ray's directory: the path of a Unix socket has at most 107 bytes."""
POLL_SECONDS = 0.1


@contextlib.contextmanager
def temporary_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These variables in this process's environment while the context lasts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def private_ray() -> Iterator[None]:
    """Give a Ray that this process starts its own token, and a directory that only this user can open.

    By default Ray uses one token for all runs of a user, and makes its directory readable for everyone, so this user
    alone must have access to the directory above it.

    Raises:
        ConfigError: the directory cannot be made.
    """
    if os.environ.get("RAY_ADDRESS"):
        yield
        return
    parent = _temporary_parent()
    try:
        directory = tempfile.mkdtemp(prefix="xray-", dir=parent)
    except OSError as error:
        raise ConfigError(f"TMPDIR: Ray needs a temporary directory: {parent!r}: {error.strerror}") from None
    variables = {name: os.environ.get(name, value) for name, value in (PATIENT | ALONE).items()}
    variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _ray_token(), "RAY_TMPDIR": directory}
    with temporary_environment(variables):
        if "ray" in sys.modules:
            _read_environment_again()
        yield
    # The logs of a failed run are kept.
    shutil.rmtree(directory, ignore_errors=True)


def _temporary_parent() -> str:
    """The directory for temporary files, or /tmp where its path would be too long for Ray's sockets."""
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) <= MAX_PARENT_BYTES:
        return parent
    log.warning("TMPDIR %r has more than %d bytes, too many for Ray's sockets: Ray uses /tmp", parent, MAX_PARENT_BYTES)
    return "/tmp"


def _read_environment_again() -> None:
    """Ray reads its settings at import, which may have been before the workspace opened."""
    from ray import _raylet

    raylet: Any = _raylet
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


@functools.cache
def _ray_token() -> str:
    # Ray reads its token once in a process, which may start several Rays in turn.
    return secrets.token_hex(32)


@contextlib.contextmanager
def ray_environment() -> Iterator[ForkServer | None]:
    """The environment of the Ray of RAY_ADDRESS, or of a private one; yields the server that forks its workers."""
    with private_ray():
        # Its processes must inherit the environment of the private Ray.
        forks = fork_server() if not os.environ.get("RAY_ADDRESS") else None
        with temporary_environment({FORK_SERVER: forks.address if forks is not None else ""}):
            yield forks


@contextlib.contextmanager
def connected_ray(forks: ForkServer | None, num_cpus: int | None = None) -> Iterator[None]:
    """Connect this process to a Ray, inside of `ray_environment`; see `running_ray`."""
    import ray

    try:
        _connect(num_cpus or usable_cores(), forks)
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def running_ray(num_cpus: int | None = None) -> Iterator[None]:
    """Connect this process to the Ray of RAY_ADDRESS, or to a private one.

    Args:
        num_cpus: of the private one; all that this process may use if not given.

    Raises:
        NotUpError: the private one did not start.
    """
    with ray_environment() as forks, connected_ray(forks, num_cpus):
        yield


def ray_servers(directory: Path | None = None) -> list[psutil.Process]:
    """Ray's servers that this process started, dead ones too, and every process of the Ray in `directory`."""
    servers = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if process.name() in SERVERS or (
                directory is not None and process.environ().get("RAY_TMPDIR") == str(directory)
            ):
                servers.append(process)
    return servers


def is_dead(process: psutil.Process) -> bool:
    """Whether a process has ended, also if it was not reaped yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _connect(num_cpus: int, forks: ForkServer | None) -> None:
    import ray

    options: dict[str, Any] = {"namespace": "xray", "log_to_driver": False, "logging_level": "ERROR"}
    if address := os.environ.get("RAY_ADDRESS"):
        ray.init(address=address, **options)
        return
    directory = Path(os.environ["RAY_TMPDIR"])
    patience = Patience("Ray", lambda: ray_servers(directory), _logs(directory))
    try:
        with _patient_node(directory, patience.check, alone=True, forks=forks):
            ray.init(include_dashboard=False, num_cpus=num_cpus, **options)
    except BaseException as error:
        # An incomplete node does not stop the processes it started.
        kill(lambda: [p for p in ray_servers(directory) if not is_dead(p)], GRACE_SECONDS)
        if isinstance(error, NotUpError) or not isinstance(error, Exception):
            raise
        # After two spaces Ray's message goes on about its logs.
        reason = first_line(error).partition("  ")[0].rstrip(".")
        raise NotUpError(f"Ray did not start: {reason}. {end_of(patience.newest_log(), *SIGNS)}") from None


@contextlib.contextmanager
def _patient_node(
    directory: Path, check: Callable[[], None], *, alone: bool = False, forks: ForkServer | None = None
) -> Iterator[None]:
    """While the context lasts, Ray starts nodes that wait for their servers until one dies or `check` raises.

    This is the only change to Ray's own code. Ray 2.60 has no option for it: `Node` gives a raylet 30 seconds, a raylet
    gives its agents 15, and the API server, the autoscaler and the workers' command cannot be chosen.
    `tests/component/test_local_ray.py` fails where another Ray does it differently.

    Args:
        directory: where Ray keeps its sessions.
        alone: start nothing that a single machine does not need (NEEDLESS, and the dashboard's agent).
        forks: starts the workers, instead of Python.
    """
    from ray import _raylet
    from ray._private import node, services

    raylet: Any = _raylet
    before, start_process = ray_servers(), services.start_ray_process

    def wait_until(works: Callable[[], bool]) -> None:
        _wait_until(works, check, lambda: [server for server in ray_servers() if server not in before], directory)

    def start_changed(command: list[str], *arguments: Any, **options: Any) -> Any:
        return start_process(_raylet_command(command, alone, forks), *arguments, **options)

    class PatientNode(node.Node):
        def start_gcs_server(self) -> None:
            # With a port of its own choice, Ray would wait half a minute for the file with its number.
            params = self._ray_params
            params.gcs_server_port = params.gcs_server_port or free_port()
            super().start_gcs_server()
            wait_until(lambda: _listens(self._node_ip_address, params.gcs_server_port))

        def start_raylet(self, *arguments: Any, **options: Any) -> None:
            for name in AGENT_PORTS:
                if not getattr(self._ray_params, name):
                    setattr(self._ray_params, name, free_port())
                # The raylet reads the port from the file that the agent would write.
                raylet.persist_port(self._session_dir, self._node_id, name, getattr(self._ray_params, name))
            services.start_ray_process = start_changed
            try:
                super().start_raylet(*arguments, **options)
            finally:
                services.start_ray_process = start_process
            wait_until(lambda: _is_registered(self.gcs_address, self._node_id))

    for name in NEEDLESS if alone else ():
        setattr(PatientNode, name, lambda *_, **__: None)
    original = node.Node
    node.Node = PatientNode
    try:
        yield
    finally:
        node.Node = original


def _wait_until(
    works: Callable[[], bool],
    check: Callable[[], None],
    servers: Callable[[], Sequence[psutil.Process]],
    directory: Path,
) -> None:
    """Wait as long as all `servers` live and `check` raises nothing. Raises NotUpError."""
    while not works():
        _check_alive(servers(), directory)
        check()
        time.sleep(POLL_SECONDS)


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def _is_registered(gcs_address: str, node_id: str) -> bool:
    """Whether a raylet has told the GCS that it is up."""
    from ray._private import services

    with contextlib.suppress(RuntimeError):
        return services.get_node(gcs_address, node_id) is not None
    return False


def _raylet_command(command: list[str], alone: bool, forks: ForkServer | None) -> list[str]:
    """The command of a raylet that starts no dashboard's agent, if it is `alone`, and its workers from `forks`."""
    if alone:
        command = [AGENT + subprocess.list2cmdline(IDLE) if a.startswith(AGENT) else a for a in command]
    if forks is not None:
        python = WORKERS + subprocess.list2cmdline([sys.executable])
        command = [argument.replace(python, WORKERS + forks.command, 1) for argument in command]
        # Forks start at once; workers that start before they are needed have no job, and so no fork server.
        command = [PRESTART + "0" if argument.startswith(PRESTART) else argument for argument in command]
    return command


def _check_alive(servers: Sequence[psutil.Process], directory: Path) -> None:
    for server in servers:
        if is_dead(server):
            logs = [_logs(directory) / f"{server.name()}.{end}" for end in ("err", "out")]
            written = [log for log in logs if log.is_file() and log.stat().st_size]
            end = end_of((written or logs)[0], *SIGNS)
            raise NotUpError(f"{server.name()} of Ray ended right after it was started. {end}")


def _logs(directory: Path) -> Path:
    return directory / "ray" / "session_latest" / "logs"


if __name__ == "__main__":
    # `python -m xray.deployments.local_ray --temp-dir=DIR …` is `ray start …` without its time limits.
    arguments = sys.argv[1:]
    parent = next(Path(a.partition("=")[2]).parent for a in arguments if a.startswith("--temp-dir="))
    os.environ |= {name: value for name, value in PATIENT.items() if name not in os.environ}
    # Ray reads them at its import.
    from ray.scripts.scripts import start

    with _patient_node(parent, lambda: None):
        start(arguments)
