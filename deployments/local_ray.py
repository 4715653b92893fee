"""A Ray of this process's own, or the one of RAY_ADDRESS.

Its own is private: it has a token that ends with it, and its sockets and logs are where only this user can reach them.
It is small: this one machine needs no autoscaler, no dashboard and nobody who collects logs. And it is started
patiently: Ray gives its processes half a minute, which a busy machine does not keep; here they have all the time they
need as long as they live and make progress.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from xray.deployments.patience import NotUpError, Patience, end_of
from xray.deployments.service import free_port
from xray_runtime.cores import usable_cores
from xray_runtime.processes import GRACE_SECONDS, kill

SERVERS = ("gcs_server", "raylet")
"""Ray's own processes. A Ray that has lost one of them is dead."""
SIGNS = (" C ", " E ")
"""What marks a failed check or an error in their logs; a stack may follow it."""
NEEDLESS = ("start_monitor", "start_api_server", "start_log_monitor")
"""Of `ray._private.node.Node`: what starts the autoscaler, the dashboard and the collector of logs."""
LONG_SECONDS = 3600
PATIENT = {
    "RAY_agent_register_timeout_ms": str(LONG_SECONDS * 1000),
    "RAY_worker_register_timeout_seconds": str(LONG_SECONDS),
}
"""Limits of Ray's servers for each other."""
ALONE = {"RAY_health_check_timeout_ms": "60000"}
"""Where this is the only machine: after 10 seconds without an answer, five times, Ray would take it for lost."""
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
"""Of Ray's parameters. A raylet dies whose agents have not told it theirs within 15 seconds; so both are told."""
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
    """Where this process starts a Ray of its own: its own token, and sockets and logs that only this user can reach.

    By itself Ray has one token for all a user's runs, and opens its directories to everybody, also one it is given:
    only the directory above that one can keep others out.

    Raises:
        NotUpError: there is no room for the directory.
    """
    if os.environ.get("RAY_ADDRESS"):
        yield
        return
    try:
        directory = tempfile.mkdtemp(prefix="xray-")
    except OSError as error:
        raise NotUpError(f"Ray needs a temporary directory (TMPDIR): {error.strerror}") from None
    variables = {name: os.environ.get(name, value) for name, value in (PATIENT | ALONE).items()}
    variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _ray_token(), "RAY_TMPDIR": directory}
    with temporary_environment(variables):
        if "ray" in sys.modules:
            _read_environment_again()
        yield
    # Those of a run that failed are kept, for whoever looks for the reason.
    shutil.rmtree(directory, ignore_errors=True)


def _read_environment_again() -> None:
    """Ray reads its settings when it is imported, which a script may have done before it opened a workspace."""
    from ray import _raylet

    raylet: Any = _raylet
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


@functools.cache
def _ray_token() -> str:
    # Ray reads its token once in a process, which may start one Ray after another.
    return secrets.token_hex(32)


@contextlib.contextmanager
def running_ray() -> Iterator[None]:
    """This process connected to the Ray of RAY_ADDRESS; where none is named, to a private one of its own.

    Raises:
        NotUpError: its own did not start.
    """
    import ray

    with private_ray():
        try:
            _connect()
            yield
        finally:
            ray.shutdown()


def ray_servers(directory: Path | None = None) -> list[psutil.Process]:
    """Ray's servers that this process started, dead ones too; those of the Ray in `directory`, with all it started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if process.name() in SERVERS or (
                directory is not None and process.environ().get("RAY_TMPDIR") == str(directory)
            ):
                found.append(process)
    return found


def is_dead(process: psutil.Process) -> bool:
    """Whether a process has ended, also where nobody has asked for its end yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _connect() -> None:
    import ray

    options: dict[str, Any] = {"namespace": "xray", "log_to_driver": False, "logging_level": "ERROR"}
    if address := os.environ.get("RAY_ADDRESS"):
        ray.init(address=address, **options)
        return
    directory = Path(os.environ["RAY_TMPDIR"])
    patience = Patience("Ray", lambda: ray_servers(directory), _logs(directory))
    try:
        with _patiently(directory, patience.check, NEEDLESS):
            ray.init(include_dashboard=False, num_cpus=usable_cores(), **options)
    except BaseException as error:
        # A node that is not yet complete does not end what it has started.
        kill(lambda: [p for p in ray_servers(directory) if not is_dead(p)], GRACE_SECONDS)
        if isinstance(error, NotUpError) or not isinstance(error, Exception):
            raise
        # Ray goes on about its logs.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition("  ")[0].rstrip(".")
        raise NotUpError(f"Ray did not start: {reason}. {end_of(patience.newest_log(), *SIGNS)}") from None


@contextlib.contextmanager
def _patiently(directory: Path, check: Callable[[], None], left_out: Sequence[str] = ()) -> Iterator[None]:
    """While the context lasts, Ray waits for its servers until one has died, or `check` raises.

    Args:
        directory: where Ray keeps its sessions.
        left_out: of NEEDLESS.
    """
    from ray import _raylet
    from ray._private import node, ray_constants, services

    raylet: Any = _raylet
    before = ray_servers()

    def until_it_works(call: Callable[..., Any], **limits: int) -> Callable[..., Any]:
        def patient(*arguments: Any, **options: Any) -> Any:
            while True:
                try:
                    return call(*arguments, **options | limits)
                except RuntimeError:
                    _check_alive([server for server in ray_servers() if server not in before], directory)
                    check()
                    time.sleep(POLL_SECONDS)

        return patient

    start_raylet = node.Node.start_raylet

    def start_with_ports(self: Any, *arguments: Any, **options: Any) -> None:
        for name in AGENT_PORTS:
            if not getattr(self._ray_params, name):
                setattr(self._ray_params, name, free_port())
            # The raylet reads it here, where the agent will write it.
            raylet.persist_port(self._session_dir, self._node_id, name, getattr(self._ray_params, name))
        start_raylet(self, *arguments, **options)

    changed: dict[tuple[Any, str], Any] = {
        (node.Node, "start_raylet"): start_with_ports,
        (node, "wait_for_persisted_port"): until_it_works(node.wait_for_persisted_port, timeout_ms=1000),
        (services, "get_node"): until_it_works(services.get_node),
        (ray_constants, "RAY_DASHBOARD_STARTUP_TIMEOUT_S"): LONG_SECONDS,
        **{(node.Node, name): lambda *_, **__: None for name in left_out},
    }
    kept = {(owner, name): getattr(owner, name) for owner, name in changed}
    for (owner, name), value in changed.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name), value in kept.items():
            setattr(owner, name, value)


def _check_alive(servers: Sequence[psutil.Process], directory: Path) -> None:
    for server in servers:
        if is_dead(server):
            logs = [_logs(directory) / f"{server.name()}.{end}" for end in ("err", "out")]
            written = [log for log in logs if log.is_file() and log.stat().st_size]
            end = end_of((written or logs)[0], *SIGNS)
            raise NotUpError(f"{server.name()} of Ray ended as soon as it was started. {end}")


def _logs(directory: Path) -> Path:
    return directory / "ray" / "session_latest" / "logs"


if __name__ == "__main__":
    # `python -m xray.deployments.local_ray --temp-dir=DIR …` is `ray start …`, patiently.
    from ray.scripts.scripts import start

    arguments = sys.argv[1:]
    parent = next(Path(a.partition("=")[2]).parent for a in arguments if a.startswith("--temp-dir="))
    os.environ |= {name: value for name, value in PATIENT.items() if name not in os.environ}
    with _patiently(parent, lambda: None):
        start(arguments)
