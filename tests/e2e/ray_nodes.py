"""Ray nodes on this machine, started as an operator starts them."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.e2e.conftest import environment
from xray.deployments.service import free_port
from xray_runtime.kernel.processes import TAG, tagged

LONG = 1200.0
CPUS = 2
"""Of each node: with one for each Workhorse, the five of a PPO stage do not fit on two nodes."""
RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
STARTS = 5
"""Ray gives a new node half a minute, which a busy machine does not always keep."""
MAY_MOUNT = subprocess.call(["unshare", "--mount", "true"], stderr=subprocess.DEVNULL) == 0


class Cluster:
    """Ray nodes as an operator starts them, guarded by a token; a node's processes are found by its mark."""

    def __init__(self, directory: Path) -> None:
        self.unshared = directory / "unshared"
        """Where there is something else on each node but the head."""
        self.unshared.mkdir()
        # The paths of Ray's sockets must be short.
        self._directory, self._sessions = directory, Path(tempfile.mkdtemp(prefix="xray-nodes-"))
        self._mark = uuid.uuid4().hex
        token = directory / "ray-token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self._port = free_port()
        self.variables = {
            "RAY_ADDRESS": f"127.0.0.1:{self._port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
        }

    def begin(self) -> None:
        self._run("head", "--head", f"--port={self._port}", f"--temp-dir={self._sessions}", "--include-dashboard=false")

    def join(self, name: str) -> None:
        hide = f'mount -t tmpfs none {self.unshared} && exec "$@"'
        own_disk = ["unshare", "--mount", "sh", "-c", hide, "sh"] if MAY_MOUNT else []
        self._run(name, f"--address={self.variables['RAY_ADDRESS']}", before=own_disk)

    def _run(self, name: str, *options: str, before: Sequence[str] = ()) -> None:
        variables = environment() | self.variables | {TAG: f"{self._mark}-{name}", "RAY_USAGE_STATS_ENABLED": "0"}
        del variables["RAY_ADDRESS"]
        # Any free worker ports: the nodes share a machine. Without --block it returns when the node is up.
        same = ["--min-worker-port=0", "--max-worker-port=0", "--object-store-memory=200000000"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-name={name}", f"--num-cpus={CPUS}"]
        log = self._directory / f"{name}.log"
        for _ in range(STARTS):
            with log.open("wb") as file:
                code = subprocess.call(
                    [*before, *command, *same, *options], env=variables, stdout=file, stderr=file, timeout=LONG
                )
            if code == 0:
                return
            self.kill(name)
        raise RuntimeError(log.read_text())

    def kill(self, name: str) -> None:
        """As when a machine loses its power."""
        for process in tagged(f"{self._mark}-{name}"):
            process.kill()

    def workers(self, name: str) -> list[str]:
        """What works for X-ray on a node."""
        found = [" ".join(process.cmdline()) for process in tagged(f"{self._mark}-{name}")]
        return [command for command in found if command.startswith("ray::") and not command.startswith(RAYS_OWN)]

    def learners(self, name: str) -> list[psutil.Process]:
        """The Workhorses of trained and scored models on a node."""
        return [
            p for p in tagged(f"{self._mark}-{name}") if p.cmdline()[:1] and p.cmdline()[0].startswith("ray::Learner")
        ]

    def end(self) -> None:
        for name in ("c", "b", "a", "head"):
            self.kill(name)
        shutil.rmtree(self._sessions)
