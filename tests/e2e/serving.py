"""`xray serve` as a process, and clients that never rest."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.e2e.conftest import ROOT, XRAY, environment
from xray.deployments.service import free_port
from xray_runtime.live.serving.middleware import SHA256_HEADER

WAIT_SECONDS = 400


@dataclass(frozen=True)
class Answer:
    """One request's."""

    client: int
    sent: float
    received: float
    sha256: str


def ask(address: str, *, stream: bool = False, new_tokens: int = 8) -> tuple[str, list[dict]]:
    """The model's sha256 by the header, and the answer or its chunks. Raises OSError or ValueError where it fails."""
    messages = [{"role": "user", "content": "how are you"}]
    body = {"messages": messages, "max_tokens": new_tokens, "ignore_eos": True, "stream": stream}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{address}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        sha256, text = answer.headers[SHA256_HEADER], answer.read().decode()
    if not stream:
        return sha256, [json.loads(text)]
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    if lines[-1] != "[DONE]":
        raise ValueError(f"the stream ended with {lines[-1:]}")
    return sha256, [json.loads(line) for line in lines[:-1]]


class Load:
    """So many clients ask, each again as soon as it is answered: one in three for short answers, whole; two in three
    for long ones of different lengths, streamed, of which some are under way at any moment."""

    def __init__(self, address: str, clients: int) -> None:
        self.answers: list[Answer] = []
        self.failures: list[str] = []
        self._address, self._ended = address, threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _client(self, number: int) -> None:
        lengths = random.Random(number)
        while not self._ended.is_set():
            sent, stream = time.monotonic(), number % 3 > 0
            try:
                sha256, said = ask(self._address, stream=stream, new_tokens=lengths.randint(40, 100) if stream else 4)
                # Of a stream the last chunk alone has it.
                if said[-1]["system_fingerprint"] != sha256:
                    raise ValueError(f"an answer of {sha256} says otherwise: {said}")
                self.answers.append(Answer(number, sent, time.monotonic(), sha256))
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")

    def by_client(self) -> Iterator[list[str]]:
        """Each client's sha256s, in order."""
        for number in range(len(self._threads)):
            yield [answer.sha256 for answer in self.answers if answer.client == number]


@dataclass
class Served:
    """The command, while it runs and after."""

    process: subprocess.Popen[bytes]
    log: Path
    address: str
    code: int | None = None
    left: list[str] = field(default_factory=list)
    """What it started and did not end."""


@contextlib.contextmanager
def serving(output: Path, ref: str, variables: Mapping[str, str] | None = None) -> Iterator[Served]:
    """`xray serve REF`, once it answers, with `variables` in its environment; at the end it is told to stop."""
    port = free_port()
    log = output / "logs" / "serve-command.log"
    command = [XRAY, "serve", ref, "--output", str(output), "--port", str(port)]
    with log.open("wb") as file:
        environ = environment() | dict(variables or {})
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=file, stderr=file)
    served = Served(process, log, f"http://127.0.0.1:{port}/v1")
    try:
        wait_for(lambda: _answers(port), served)
        yield served
    finally:
        tree = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        served.code = process.wait(100)
        served.left = [" ".join(p.cmdline())[:80] for p in psutil.wait_procs(tree, timeout=20)[1]]


def wait_for(condition: Callable[[], bool], served: Served) -> None:
    """Until `condition` holds; an error, with what the command said, when it never does."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if served.process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"xray serve: {served.process.returncode}\n{served.log.read_text()}")
        time.sleep(0.1)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
        return True
    return False


@contextlib.contextmanager
def changed(path: Path) -> Iterator[None]:
    """One bit of a file is another, for a while."""
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    try:
        yield
    finally:
        path.write_bytes(sound)
