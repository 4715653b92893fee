"""A server that X-ray starts: the Prefect server of a single run (`local_services`), or one of `xray up` (`servers`).

It runs in its own session, so that it outlives a terminal. It is identified by process id and start time, or by a
process tag that its descendants inherit, never by its name.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

from xray.deployments.patience import NotUpError, Patience, end_of
from xray_runtime.kernel.processes import kill, tagged

LOOPBACK = "127.0.0.1"
SERVER_PORTS = range(20_000, 32_000)
"""Outside the range from which systems choose ports of outgoing connections."""
STOP_SECONDS = 8.0
SAY_SECONDS = 20.0
POLL_SECONDS = 0.1
SAME_SECONDS = 1.0
"""Allowed difference of a process's start time from the record: the system's clock may have been set."""


class ProcessRecord(BaseModel):
    """A process we started. The process id alone is not enough: the system may reuse it."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True)

    pid: int
    created: float
    """Seconds since 1970."""

    @classmethod
    def of(cls, pid: int) -> ProcessRecord:
        return cls(pid=pid, created=psutil.Process(pid).create_time())

    def find(self) -> psutil.Process | None:
        """The process, if it is still running."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < SAME_SECONDS
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None


@dataclass
class Service:
    """One server.

    Attributes:
        title: its name for people.
        environment: all of its environment variables.
        address: shown to people.
        health: a URL that answers once the service works, or a function of the start time of its process.
        cwd: working directory; None: this process's.
        host: address that its ports are bound to.
        ports: names of the ports (`server_home.PORTS`) that must be free before it starts.
        tag: process tag in its environment; every process with it is stopped too. None: only its own process.
        keeps_children: whether its child processes outlive it.
        stop_s: time for its processes to end by themselves.
        prepare: called before each start.
        record: its process, if it was started.
    """

    name: str
    title: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    address: str
    health: str | Callable[[float], bool]
    cwd: Path | None = None
    host: str = LOOPBACK
    ports: tuple[str, ...] = ()
    tag: str | None = None
    keeps_children: bool = False
    stop_s: float = STOP_SECONDS
    prepare: Callable[[], None] = lambda: None
    record: ProcessRecord | None = None
    _child: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def find(self) -> psutil.Process | None:
        """Its process, if it is running."""
        return self.record.find() if self.record is not None else None

    def start(self) -> None:
        """Start it, without waiting until it works."""
        self.prepare()
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                self.command,
                cwd=self.cwd,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.record = ProcessRecord.of(self._child.pid)

    def is_healthy(self) -> bool:
        """Whether it is running and works."""
        if self.find() is None:
            return False
        assert self.record is not None
        return answers(self.health) if isinstance(self.health, str) else self.health(self.record.created)

    def wait_healthy(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Wait until it works; calls `say` from time to time if that takes long.

        Raises:
            NotUpError: it ended, or has done nothing for too long.
        """
        begin = spoken = time.monotonic()
        patience = Patience(self.title, self._family, self.log)
        while not self.is_healthy():
            if self.find() is None:
                raise NotUpError(f"{self.title} ended right after it was started. {end_of(self.log)}")
            patience.check()
            now = time.monotonic()
            if now - spoken > SAY_SECONDS:
                spoken = now
                say(f"still waiting for {self.title} ({now - begin:.0f} s)")
            time.sleep(POLL_SECONDS)

    def stop(self) -> bool:
        """Stop it; returns whether any process of it was running."""
        ran = bool(self._processes())
        kill(self._processes, self.stop_s)
        if self._child is not None:
            self._child.poll()
        self.record = None
        return ran

    def _processes(self) -> list[psutil.Process]:
        if self.tag is not None:
            return tagged(self.tag)
        process = self.find()
        return [process] if process is not None else []

    def _family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            if (process := self.find()) is not None:
                return [process, *process.children(recursive=True)]
        return []


def answers(url: str) -> bool:
    """Whether a server answers at `url`."""
    with contextlib.suppress(OSError, ValueError):
        urllib.request.urlopen(url, timeout=3).close()
        return True
    return False


_begin = random.SystemRandom().randrange(len(SERVER_PORTS))
_ports = itertools.cycle([*SERVER_PORTS[_begin:], *SERVER_PORTS[:_begin]])


def free_port() -> int:
    """A free port on loopback, another one at each call. Raises OSError if there is none."""
    for port in itertools.islice(_ports, len(SERVER_PORTS)):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind((LOOPBACK, port))
            return port
    raise OSError(f"no port from {SERVER_PORTS.start} to {SERVER_PORTS.stop - 1} is free on {LOOPBACK}")
