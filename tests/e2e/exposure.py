"""Which processes of a run others can reach: their ports, and whether they ask for a token or a password."""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from dataclasses import dataclass, field

import psutil

from xray_runtime.kernel.processes import tagged


@dataclass(frozen=True)
class Exposure:
    """The open ports of the processes that carry a run's mark."""

    num_processes: int
    listening_to_others: list[tuple[str, str | None]] = field(default_factory=list)
    """(command line, RAY_AUTH_MODE) of those that listen on more than loopback."""
    prefect_status: int = 200
    """Status with which the run's Prefect answers a request without a password."""


def exposure_of(pid: int) -> Exposure:
    """The exposure of the run that process `pid` started."""
    marks = set()
    for child in psutil.Process(pid).children(recursive=True):
        # Some live for moments alone.
        with contextlib.suppress(psutil.Error):
            marks |= {child.environ().get("XRAY_RUN_TAG")} - {None}
    [mark] = marks
    processes, open_to_others, addresses = tagged(mark), [], set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            line, environ = " ".join(process.cmdline()), process.environ()
            addresses.add(environ.get("PREFECT_API_URL", ""))
            hosts = {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
            if hosts - {"127.0.0.1", "::1"}:
                open_to_others.append((line, environ.get("RAY_AUTH_MODE")))
    status = 200
    try:
        urllib.request.urlopen(f"{max(addresses)}/version", timeout=20)
    except urllib.error.HTTPError as error:
        status = error.code
    return Exposure(len(processes), open_to_others, status)
