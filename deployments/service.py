"""A server that X-ray starts: how it is started, when it works, how it is stopped.

Both the Prefect server of a single run (`local_services`) and everything `xray up` keeps running (`servers`) are a
`Service`. It runs in a session of its own, so that it outlives a terminal, and is identified by its process id and
start time, or by a process tag that its descendants inherit; never by its name.
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
from xray_runtime.processes import kill, tagged

LOOPBACK = "127.0.0.1"
SERVER_PORTS = range(20_000, 32_000)
"""A server may need seconds to come up; systems give none of these to connections on their way out meanwhile."""
STOP_SECONDS = 8.0
SAY_SECONDS = 20.0
POLL_SECONDS = 0.1
SAME_SECONDS = 1.0
"""A process is the recorded one when its start differs by less: the system's clock may have been set."""


class ProcessRecord(BaseModel):
    """A process we started. The process id alone is not enough: the system may have given it to another process."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pid: int
    created: float
    """Seconds since 1970."""

    @classmethod
    def of(cls, pid: int) -> ProcessRecord:
        """The record of a process that runs."""
        return cls(pid=pid, created=psutil.Process(pid).create_time())

    def find(self) -> psutil.Process | None:
        """The process, if it still runs."""
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
        address: where people find it.
        health: a URL that answers once the service works, or a function of the time its process started.
        cwd: its working directory; None is this process's.
        host: what its ports are on.
        ports: names of the ports (`server_home.PORTS`) that must be free before it starts.
        tag: process tag in its environment; all that carries it is stopped with it. None: only its own process is.
        keeps_children: what it started goes on when it dies.
        stop_s: how long its processes have to end by themselves.
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
        """Its process, if it runs."""
        return self.record.find() if self.record is not None else None

    def start(self) -> None:
        """Start it; it may take a while until it works."""
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
        """Whether it runs and works."""
        if self.find() is None:
            return False
        assert self.record is not None
        return answers(self.health) if isinstance(self.health, str) else self.health(self.record.created)

    def wait_healthy(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Wait until it works; `say` is told when that takes long.

        Raises:
            NotUpError: it ended, or does nothing any more.
        """
        begin = spoken = time.monotonic()
        patience = Patience(self.title, self._family, self.log)
        while not self.is_healthy():
            if self.find() is None:
                raise NotUpError(f"{self.title} ended as soon as it was started. {end_of(self.log)}")
            patience.check()
            now = time.monotonic()
            if now - spoken > SAY_SECONDS:
                spoken = now
                say(f"still waiting for {self.title} ({now - begin:.0f} s)")
            time.sleep(POLL_SECONDS)

    def stop(self) -> bool:
        """End it; returns whether anything of it ran."""
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
        """Its process, and what that started."""
        with contextlib.suppress(psutil.Error):
            if (process := self.find()) is not None:
                return [process, *process.children(recursive=True)]
        return []


def answers(url: str) -> bool:
    """Whether a page is there."""
    with contextlib.suppress(OSError, ValueError):
        urllib.request.urlopen(url, timeout=3).close()
        return True
    return False


_begin = random.SystemRandom().randrange(len(SERVER_PORTS))
_ports = itertools.cycle([*SERVER_PORTS[_begin:], *SERVER_PORTS[:_begin]])


def free_port() -> int:
    """A port on loopback that nothing listens on, another one at each call. Raises OSError where there is none."""
    for port in itertools.islice(_ports, len(SERVER_PORTS)):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind((LOOPBACK, port))
            return port
    raise OSError(f"no port from {SERVER_PORTS.start} to {SERVER_PORTS.stop - 1} is free on {LOOPBACK}")
