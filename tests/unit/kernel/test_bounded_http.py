"""Answers that decompress to gigabytes, never end or nest too deeply, to every client of servers that others run."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import resource
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.sweeps import sweep
from xray.studio.feedback_client import send_feedback
from xray_runtime.agents.environments.http import from_http
from xray_runtime.agents.runner import _ServiceRunner
from xray_runtime.agents.sandboxes.base import Box, Limits
from xray_runtime.agents.sandboxes.remote import RemoteSandbox
from xray_runtime.kernel import bounded_http
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.rewards.kinds.service import ServiceConfig, ServiceSource
from xray_runtime.rewards.source import Batch

SOME = 2**16
PLAIN = json.dumps({"scores": [0]}).encode()


def bomb(*layers: Callable[[bytes], bytes]) -> bytes:
    """200 MB of spaces, compressed."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    content = b"".join(packer.compress(b" " * 2**20) for _ in range(200)) + packer.flush()
    for layer in layers:
        content = layer(content)
    return content


BOMB = bomb()
ANSWERS: dict[str, tuple[dict[str, str], bytes]] = {
    "gzip": ({"Content-Encoding": "gzip"}, BOMB),
    "gzip twice": ({"Content-Encoding": "gzip, gzip"}, gzip.compress(BOMB)),
    "gzip five times": ({"Content-Encoding": ", ".join(["gzip"] * 5)}, BOMB),
    "GZIP": ({"Content-Encoding": "GZIP"}, BOMB),
    "x-gzip": ({"Content-Encoding": "x-gzip"}, BOMB),
    "deflate": ({"Content-Encoding": "deflate"}, zlib.compress(bytes(2**20))),
    "gzip after identity": ({"Content-Encoding": "identity, gzip"}, BOMB),
    "br": ({"Content-Encoding": "br"}, b"\x0b\x02\x80"),
    "zstd": ({"Content-Encoding": "zstd"}, b"(\xb5/\xfd"),
    "a small gzip": ({"Content-Encoding": "gzip"}, gzip.compress(PLAIN)),
    "too long": ({}, b" " * (SOME + 1)),
    "deep": ({}, b"[" * 60_000),
    "deep objects": ({}, b'{"a":' * 10_000),
    "no JSON": ({}, b"\xff\xfe"),
    "a long number": ({}, b"1" * 6_000),
}


class Server:
    """Answers everything with one answer."""

    def __init__(self) -> None:
        self.answer: tuple[dict[str, str], bytes] = ({}, b"")
        self.asked = list[str | None]()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.asked.append(self.headers.get("Accept-Encoding"))
                self.rfile.read(int(self.headers.get("content-length", 0)))
                headers, content = server.answer
                self.send_response(200)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(content)

            do_DELETE = do_POST

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


def reward_service(url: str) -> str:
    config = ServiceConfig(url=url, retries=0, timeout_s=30.0)
    [score] = ServiceSource(config).score(Batch(["p"], ["r"], [[{"role": "user", "content": "p"}]]))
    return str(score.why)


def environment(url: str) -> str:
    async def reset() -> str:
        try:
            await from_http(f"{url}/shop")().reset({}, 0)
        except ValueError as error:
            return str(error)
        return ""

    return asyncio.run(reset())


def agent(url: str) -> str:
    return str(_ServiceRunner(url, 30.0)._ask({}).broken)


def sandbox_service(url: str) -> str:
    try:
        RemoteSandbox(url).start(Box(Limits(1.0, 64, 100, 1, 1)))
    except OSError as error:
        return str(error)
    return ""


CLIENTS = [reward_service, environment, agent, sandbox_service]


@pytest.mark.parametrize(("client", "name"), sweep(CLIENTS, list(ANSWERS)))
def test_an_answer_is_refused_in_one_line(
    name: str, client: Callable[[str], str], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_http, "MAX_ANSWER_BYTES", SOME)
    server.answer = ANSWERS[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = client(server.url)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB
    parts = ("has Content-Encoding '", "is longer than", "is not JSON", "is not an object", "is a int")
    assert any(part in said for part in parts), said
    assert "\n" not in said
    assert len(said) < 1000
    assert set(server.asked) == {"identity"}


def test_a_plain_answer_counts(server: Server) -> None:
    server.answer = ({"Content-Encoding": "identity"}, PLAIN)
    assert reward_service(server.url) == "None"


def test_a_refused_verdict_is_read_to_a_limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    server.answer = ({"Content-Encoding": "gzip, gzip"}, gzip.compress(BOMB))
    answer: Any = SimpleNamespace(id="a", model="m")
    send_feedback(server.url, "key", [(answer, "judge", {"score": 1})])  # 200: nothing of it is read
    monkeypatch.setattr(BaseHTTPRequestHandler, "send_response", _refusing(BaseHTTPRequestHandler.send_response))
    with pytest.raises(ConfigError, match="does not answer"):
        send_feedback(server.url, "key", [(answer, "judge", {"score": 1})])


def _refusing(send: Any) -> Any:
    return lambda self, status, *more: send(self, 400, *more)
