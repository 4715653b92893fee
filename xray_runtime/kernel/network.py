"""Addresses that a run depends on: whether they answer, and loopback without a proxy."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import threading
import urllib.error
import urllib.request
import urllib.response
from collections.abc import Callable, Mapping, MutableMapping
from functools import lru_cache
from urllib.parse import SplitResult, urlsplit

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.credentials import strip_credentials
from xray_runtime.kernel.errors import first_line

CONNECT_S = 8.0
"""Time limit to look up an address, to connect to it, and for its answer."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}
MAX_ANSWER_BYTES = 2**20
MLFLOW_API = "/api/2.0/mlflow/experiments/get-by-name"


def exempt_loopback(environment: MutableMapping[str, str] = os.environ) -> None:
    """Send requests to this machine past any proxy: our servers listen on loopback, which no proxy reaches."""
    listed = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    given = [host.strip() for host in listed.split(",") if host.strip()]
    hosts = given if "*" in given else [*given, *(host for host in LOOPBACK if host not in given)]
    # Libraries read one of the two.
    environment["no_proxy"] = environment["NO_PROXY"] = ",".join(hosts)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; the only such name is localhost."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_addresses(environment: Mapping[str, str] = os.environ) -> None:
    """Check that the servers which the environment names answer, before a run waits for one that is gone.

    Raises:
        ConfigError: one does not; the message names the variable and the address.
    """
    if address := environment.get("PREFECT_API_URL"):
        _require_prefect("PREFECT_API_URL", address)
    if address := environment.get("MLFLOW_TRACKING_URI"):
        require_mlflow("MLFLOW_TRACKING_URI", address)
    address = environment.get("RAY_ADDRESS", "")
    if ":" in address and (reason := unreachable(f"ray://{address}")) is not None:
        raise ConfigError(f"RAY_ADDRESS: {address!r} cannot be reached ({reason}); must be HOST:PORT of a cluster")


def unreachable(address: str) -> str | None:
    """Why neither the host of an address nor the proxy before it can be connected to; None if it can."""
    parts = _with_proxy(address)
    try:
        port = parts.port or PORTS.get(parts.scheme.partition("+")[0], 80)
    except ValueError as error:
        return first_line(error)

    def connect() -> None:
        socket.create_connection((parts.hostname or "", port), timeout=CONNECT_S).close()

    reason = _reason(connect)
    return None if reason is None else f"{parts.hostname}: {reason}"


def answer(url: str) -> tuple[int, bytes]:
    """(status, beginning of the body) of a GET request. Raises OSError: there is no answer within CONNECT_S."""
    sockets: list[tuple[int, bytes]] = []

    def ask() -> None:
        with contextlib.closing(_opened(url)) as response:
            sockets.append((response.status or 0, response.read(MAX_ANSWER_BYTES)))

    reason = _reason(ask)
    if reason is not None:
        raise OSError(reason)
    return sockets[0]


@lru_cache(maxsize=16)
def require_mlflow(field: str, address: str) -> None:
    """Raises ConfigError: MLflow, or the database it names, does not answer. MLflow's own client would retry for
    minutes."""
    if urlsplit(address).hostname is None:
        return
    if address.startswith(("http://", "https://")):
        # A call that every server knows, also where the experiment is not there.
        _require(field, address, "an MLflow server", f"{MLFLOW_API}?experiment_name=Default", _is_object)
    elif (reason := unreachable(address)) is not None:
        raise ConfigError(f"{field}: {strip_credentials(address)!r} cannot be reached ({reason})")


def _require_prefect(field: str, address: str) -> None:
    """Raises ConfigError: no Prefect server answers at `address`, which includes /api."""
    _require(field, address, "a Prefect server's API", "/health", lambda body: body == b"true")


def _require(field: str, address: str, what: str, path: str, is_right: Callable[[bytes], bool]) -> None:
    shown = strip_credentials(address)
    try:
        status, body = answer(address.rstrip("/") + path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}: {shown!r} does not answer ({first_line(error)}); must be {what}") from None
    if status not in (401, 403) and not is_right(body.strip()):
        raise ConfigError(f"{field}: {shown!r} is not {what} (GET {path.partition('?')[0]} gives HTTP {status})")


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body), dict)
    except ValueError:
        return False


def _opened(url: str) -> urllib.response.addinfourl | urllib.error.HTTPError:
    try:
        response: urllib.response.addinfourl = urllib.request.build_opener().open(url, timeout=CONNECT_S)
        return response
    except urllib.error.HTTPError as error:
        return error


def _with_proxy(address: str) -> SplitResult:
    parts = urlsplit(address)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        return urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return parts


def _reason(call: Callable[[], None]) -> str | None:
    """Why `call` fails or has no result within CONNECT_S; None if it succeeds."""
    reasons: list[str | None] = []

    def run() -> None:
        try:
            call()
            reasons.append(None)
        except Exception as error:  # a server that speaks another protocol raises HTTPException
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            strerror = cause.strerror if isinstance(cause, OSError) else None
            reasons.append(strerror or (first_line(cause) if isinstance(cause, BaseException) else str(cause)))

    # In a thread, since looking up a name has no time limit.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(CONNECT_S)
    return reasons[0] if reasons else f"no answer in {CONNECT_S:.0f} s"
