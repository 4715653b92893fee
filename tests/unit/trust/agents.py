"""A real SSH agent with keys of its own, for tests."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_agent = pytest.mark.skipif(shutil.which("ssh-agent") is None, reason="needs OpenSSH's client")


@dataclass
class Agent:
    """An ssh-agent that a test starts and ends; its socket stays the same."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "agent.sock"

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(["ssh-agent", "-D", "-a", self.socket], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not self.socket.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def run(self, *command: object) -> None:
        environment = {"PATH": "/usr/bin:/bin", "SSH_AUTH_SOCK": str(self.socket)}
        subprocess.run([*map(str, command)], env=environment, check=True, capture_output=True)

    def key(self, name: str, kind: str = "ecdsa", bits: int = 256) -> Path:
        """The public half of a new key, which the agent holds; the private half is beside it."""
        path = self.folder / name
        subprocess.run(["ssh-keygen", "-q", "-t", kind, "-b", str(bits), "-N", "", "-f", path], check=True)
        self.run("ssh-add", path)
        return path.with_name(f"{name}.pub")


@contextlib.contextmanager
def ssh_agent() -> Iterator[Agent]:
    # The path of a socket is short.
    with tempfile.TemporaryDirectory(prefix="agent-") as folder:
        agent = Agent(Path(folder))
        agent.start()
        try:
            yield agent
        finally:
            agent.end()
