"""Sandboxes of this machine: confined commands in children of a worker process, which limits them."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import threading
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from xray_runtime.agents.outcomes import then
from xray_runtime.agents.sandboxes.base import Box, Ended, Program
from xray_runtime.agents.supervisor import AgentWorker
from xray_runtime.kernel.confine.confine import (
    EXTRA_PROCESSES,
    OWN_ROOM,
    Confinement,
    View,
    check_kept_in,
    confined,
    confinement,
    plain_environment,
    venv_paths,
)


@dataclass
class _Started:
    box: Box
    home: Path
    runs: dict[int, Future[Any]] = field(default_factory=dict)


class LocalSandbox:
    """`agents.sandboxes.base.Sandbox`.

    Args:
        log_path: file for what programs write to their standard error.
        how: None: as well as this machine allows.
        accepts_weak: whether programs may run where nothing here keeps them in.

    Raises:
        ValueError: nothing keeps them in (one line with the remedies).
        RuntimeError: its worker does not start.
    """

    def __init__(self, log_path: Path, how: Confinement | None = None, accepts_weak: bool = False) -> None:
        self._how = how or confinement()
        check_kept_in(self._how, accepts_weak)
        self._worker = AgentWorker(None, log_path)
        self._lock, self._names = threading.Lock(), itertools.count()
        self._started: dict[str, _Started] = {}

    def start(self, box: Box) -> str:
        with self._lock:
            name = str(next(self._names))
            self._started[name] = _Started(box, Path(tempfile.mkdtemp(prefix="xray-agent-")))
            return name

    def run(self, name: str, program: Program) -> Future[Ended]:
        started = self._started[name]
        box, limits = started.box, asdict(started.box.limits)
        limits["extra_processes"] = EXTRA_PROCESSES[self._how]
        venv = [] if box.venv is None else venv_paths(box.venv)
        view = View(started.home, venv, box.files, box.gateway, box.limits.disk_mb, box.limits.processes)
        variables = plain_environment(started.home, self._how) | program.variables
        if box.venv is not None:
            path = os.pathsep.join([str(box.venv / "bin"), variables["PATH"]])
            variables |= {"VIRTUAL_ENV": str(box.venv), "PATH": path}
        request: dict[str, Any] = {
            "command": confined(program.command, view, self._how),
            "stdin": program.stdin,
            "variables": variables,
        }
        request |= {"directory": str(started.home), "limits": limits, "gateway": None}
        if box.gateway is not None and self._how in OWN_ROOM:
            gateway = urlsplit(box.gateway)
            request["gateway"] = [gateway.hostname, gateway.port]
        number, answer = self._worker.run(request)
        started.runs[number] = answer
        return then(answer, lambda ended: Ended(**ended))

    def stop(self, name: str) -> None:
        with self._lock:
            started = self._started.pop(name, None)
        if started is None:
            return
        for number, answer in started.runs.items():
            self._worker.kill(number)
            answer.result()
        shutil.rmtree(started.home, ignore_errors=True)

    def address(self, gateway: str) -> str:
        # A sandbox has a network of its own, whose loopback has the gateway's port.
        return f"http://127.0.0.1:{urlsplit(gateway).port}" if self._how in OWN_ROOM else gateway

    def close(self) -> None:
        self._worker.close()
        for name in list(self._started):
            self.stop(name)
