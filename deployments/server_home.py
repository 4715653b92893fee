"""The server home: the one directory `xray up` keeps everything in, and the state file there.

    HOME/state.json          ports and processes of the services
    HOME/output/             results of lifecycles: checkpoints, records, the signed log
    HOME/signing.pem         the key that signs them, apart from them
    HOME/prefect/, mlflow/   the servers' databases and artifacts
    HOME/ray-token           token for the ports of Ray
    HOME/logs/               the output of every service

Ray's sessions are elsewhere, because the paths of its sockets must be short.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError

from xray.deployments.databases import VARIABLES, check_databases
from xray.deployments.service import LOOPBACK, ProcessRecord
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.envelope import new_private_key
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.network import is_loopback
from xray_runtime.kernel.processes import QUIET
from xray_runtime.trust.signing import KEY_VARIABLE

PORTS = {"prefect": 4200, "mlflow": 5000, "ray": 6379, "dashboard": 8265}


class State(BaseModel):
    """The state that commands share."""

    model_config = ConfigDict(defer_build=True, extra="forbid")

    tag: str
    """Prefix of the process tags (`xray_runtime.kernel.processes.TAG`) of every process of this server home."""
    host: str = LOOPBACK
    ports: dict[str, int] = PORTS
    started: dict[str, ProcessRecord] = {}
    databases: dict[str, str] = {}
    """Service → `HOST:PORT/NAME` of its PostgreSQL, without user and password."""


@dataclass(frozen=True)
class ServerHome:
    """The directory at `path`."""

    path: Path

    @staticmethod
    def ray_sessions(state: State) -> Path:
        return Path(tempfile.gettempdir()) / f"xray-{state.tag[:12]}"

    @property
    def output(self) -> Path:
        return self.path / "output"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def make(self) -> None:
        """Create the directory with an empty store and the token.

        Raises:
            ConfigError: the directory cannot be made.
        """
        try:
            for name in ("logs", "prefect", "mlflow", "output/checkpoints"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--home: {str(self.path)!r} is not allowed: {error.strerror}") from None
        self.path.chmod(0o700)
        if not self._token.exists():
            write_atomic(self._token, secrets.token_hex(32))
            self._token.chmod(0o600)
        if not self._key.exists() and not (self.output / "keys" / "signing.pem").exists():
            write_atomic(self._key, new_private_key(), 0o600)

    @property
    def signing_key(self) -> Path | None:
        """The key that signs what runs here compute; None where `output` already had one when this home was made.

        A key that is put into `output` later is not used.
        """
        return self._key if self._key.exists() else None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Allow only one `up` or `down` at a time. Raises ConfigError."""
        try:
            with FileLock(self.path / "lock").acquire(timeout=0):
                yield
        except Timeout:
            raise ConfigError(f"--home: another xray up or down is running in {str(self.path)!r}") from None

    def load(self) -> State | None:
        """The state; None if nothing was ever started. Raises ConfigError if the file cannot be read."""
        path = self.path / "state.json"
        try:
            return State.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is damaged"
            raise ConfigError(f"{path}: cannot be used ({reason})") from None

    def save(self, state: State) -> None:
        write_atomic(self.path / "state.json", state.model_dump_json(indent=2))

    def environment(self, state: State) -> dict[str, str]:
        """The environment of every service and flow run, without the addresses of databases."""
        # Ray would prefer a token from the shell to this server home's file.
        hidden = {"RAY_AUTH_TOKEN", *VARIABLES.values()}
        known = {name: value for name, value in os.environ.items() if name not in hidden}
        port = state.ports["prefect"]
        origins = [f"http://{host}:{port}" for host in (clients_address(state.host), "localhost")]
        return (
            QUIET
            | {
                # Show our log messages on the flow run's page.
                "PREFECT_LOGGING_EXTRA_LOGGERS": "xray,xray_runtime",
                # `xray down` sets a run's state before SIGTERM, which must not make it Crashed.
                "PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR": "reschedule",
                # With leases in memory, slots would stay taken after the server was killed.
                "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
                # Other pages in the same browser cannot query Prefect.
                "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(origins),
            }
            | ({KEY_VARIABLE: str(self.signing_key)} if self.signing_key is not None else {})
            | known
            | {
                # The services write to logs; QUIET is for terminals.
                "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
                "XRAY_HOME": str(self.path),
                "PREFECT_HOME": str(self.path / "prefect"),
                "PREFECT_API_URL": f"http://{clients_address(state.host)}:{port}/api",
                "MLFLOW_TRACKING_URI": f"http://{LOOPBACK}:{state.ports['mlflow']}",
                "RAY_ADDRESS": f"{LOOPBACK}:{state.ports['ray']}",
                # Ray always listens on every interface.
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(self._token),
            }
        )

    @property
    def _token(self) -> Path:
        return self.path / "ray-token"

    @property
    def _key(self) -> Path:
        return self.path / "signing.pem"


def find_server_home(home: Path | None, environment: Mapping[str, str] = os.environ) -> ServerHome:
    """The server home of --home, else XRAY_HOME, else ~/.xray."""
    return ServerHome((home or Path(environment.get("XRAY_HOME") or "~/.xray")).expanduser().absolute())


def new_state(
    old: State | None, host: str | None, ports: Mapping[str, int | None], environment: Mapping[str, str] = os.environ
) -> State:
    """The state `up` should reach, from the options, else the state file, else the defaults.

    Raises:
        ConfigError: a running service would have to move, or a database cannot be used.
    """
    state = old.model_copy(deep=True) if old is not None else State(tag=uuid.uuid4().hex)
    requested: dict[str, int] = {name: port for name, port in ports.items() if port is not None}
    running = {name for name, started in state.started.items() if started.find()}
    if running:
        if host is not None and host != state.host:
            raise ConfigError(
                f"--host: {host!r} is not allowed while the servers use {state.host!r}: `xray down` first"
            )
        for name, port in requested.items():
            if port != state.ports[name]:
                text = f"--{name}-port: {port} is not allowed while {state.ports[name]} is in use: `xray down` first"
                raise ConfigError(text)
    state.host = host or state.host
    state.ports = state.ports | requested
    for name, port in state.ports.items():
        same = [other for other, taken in state.ports.items() if taken == port and other != name]
        if same:
            raise ConfigError(f"--{name}-port: {port} is not allowed: {same[0]} has the same port")
    state.databases = check_databases(state.databases, running, environment)
    return state


def check_free(host: str, option: str, port: int) -> None:
    """Raises ConfigError if another program listens on the port that `option` names."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{option}: {port} is not allowed: {error.strerror} on {host}") from None


def check_host(host: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError if others could open Prefect's pages without a password."""
    if is_loopback(host):
        return
    names = ("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING")
    missing = [name for name in names if not all(environment.get(name, "").partition(":"))]
    if missing:
        raise ConfigError(
            f"--host: {host!r} is not allowed without authentication: set {' and '.join(missing)} to USER:PASSWORD"
        )
    if len({environment[name] for name in names}) > 1:
        raise ConfigError(f"--host: {host!r} is not allowed while {' and '.join(names)} differ")


def clients_address(host: str) -> str:
    """The address at which programs on this machine reach a server that listens on `host`."""
    return LOOPBACK if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
