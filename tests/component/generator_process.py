"""Servers of replies as processes: `xray generator`, and what others share with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from xray.deployments.service import free_port

START_S = 400


class ServerProcess:
    """A server on this machine, in a session of its own."""

    process: subprocess.Popen[bytes]
    port: int
    key: str = ""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        end = time.monotonic() + START_S
        request = urllib.request.Request(f"{self.address}/health", headers={"Authorization": f"Bearer {self.key}"})
        while True:
            try:
                urllib.request.urlopen(request, timeout=5).close()
            except OSError:
                assert self.process.poll() is None, "the server ended"
                assert time.monotonic() < end, "the server did not answer"
                time.sleep(0.2)
            else:
                return

    def kill(self) -> None:
        """End it and its engine at once, as where a machine is lost."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class GeneratorProcess(ServerProcess):
    """A server with one thread, which keeps its port when it is started again."""

    model: Path
    max_length: int
    key: str = ""
    port: int = field(default_factory=free_port)

    def start(self) -> None:
        """Begin to start; `wait` until it answers."""
        options = ["--port", str(self.port), "--max-length", str(self.max_length)]
        options += ["--set", "threads=1", "--set", "device=cpu", "--set", "generator_memory_gib=0.25"]
        command = [str(Path(sys.executable).with_name("xray")), "generator", str(self.model), *options]
        variables = os.environ | {"XRAY_API_KEY": self.key}
        self.process = subprocess.Popen(command, env=variables, start_new_session=True)


@contextmanager
def running(model: Path, max_length: int, key: str = "") -> Iterator[GeneratorProcess]:
    """A server that is being started."""
    server = GeneratorProcess(model, max_length, key)
    server.start()
    try:
        yield server
    finally:
        server.kill()
