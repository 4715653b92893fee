"""HAProxy as we configure it, in front of servers that say who they are."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from xray.deployments.service import free_port
from xray_runtime.live.serving import NotServedError
from xray_runtime.live.serving.middleware import PROXY_HEADER
from xray_runtime.live.serving.reverse_proxy import ReverseProxy

WAIT_SECONDS = 20.0


class Model(ThreadingHTTPServer):
    """Answers with its name: `/slow` in two chunks, the second when `go` is set; `/waits` not before the client leaves.

    One that `dies` cuts the connection when `go` is set, without an answer.
    """

    def __init__(self, name: str) -> None:
        self.name, self.go, self.left = name, threading.Event(), threading.Event()
        self.secrets: list[str | None] = []
        self.dies = False
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.server_port

    def handle_error(self, *_: object) -> None:
        """A connection that is cut is what some tests want."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Model

    def do_POST(self) -> None:
        model = self.server
        self.rfile.read(int(self.headers["content-length"]))
        model.secrets += self.headers.get_all(PROXY_HEADER, [None])
        if model.dies or self.path == "/waits":
            self.close_connection = True
            if model.dies:
                model.go.wait(WAIT_SECONDS)
            else:
                with contextlib.suppress(ConnectionResetError):
                    assert self.connection.recv(1) == b""
                model.left.set()
            return
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self._chunk(model.name)
        if self.path == "/slow":
            model.go.wait(WAIT_SECONDS)
            self._chunk(" to the end")
        self._chunk("")

    def _chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def models() -> Iterator[Callable[[str], Model]]:
    made: list[Model] = []

    def make(name: str) -> Model:
        made.append(Model(name))
        return made[-1]

    yield make
    for model in made:
        model.go.set()
        model.shutdown()
        model.server_close()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], tuple[ReverseProxy, int]]]:
    started: list[ReverseProxy] = []

    def make(num_replicas: int) -> tuple[ReverseProxy, int]:
        port = free_port()
        started.append(ReverseProxy("127.0.0.1", port, num_replicas, tmp_path / "front.log"))
        return started[-1], port

    yield make
    for front in started:
        front.stop(0.1)


def ask(client: http.client.HTTPConnection | int, path: str = "/") -> str:
    """The answer, over a connection that stays open; to a port, over a new one."""
    if isinstance(client, int):
        client = http.client.HTTPConnection("127.0.0.1", client, timeout=WAIT_SECONDS)
    client.request("POST", path, body="x")
    answer = client.getresponse()
    text = answer.read().decode()
    return text if answer.status == 200 else str(answer.status)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


Start = Callable[[int], tuple[ReverseProxy, int]]
Models = Callable[[str], Model]


def test_a_move_is_for_the_next_request_and_what_was_begun_ends_where_it_began(start: Start, models: Models) -> None:
    front, port = start(1)
    assert ask(port) == "503"
    old, new = models("old"), models("new")
    first = front.move([old.address])
    stays = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
    assert ask(stays) == "old"
    with ThreadPoolExecutor() as threads:
        begun = threads.submit(ask, port, "/slow")
        wait_for(lambda: front.num_requests(first) == 1)
        second = front.move([new.address])
        assert ask(stays) == "new"
        assert ask(port) == "new"
        assert (front.num_requests(first), front.num_requests(second)) == (1, 0)
        old.go.set()
        assert begun.result() == "old to the end"
    wait_for(lambda: front.num_requests(first) == 0)
    third = models("third")
    assert front.move([third.address]) == first
    assert ask(stays) == "third"
    assert {*old.secrets, *new.secrets, *third.secrets} == {front.secret}


def test_clients_cannot_send_the_secret_of_the_front(start: Start, models: Models) -> None:
    front, port = start(1)
    model = models("m")
    front.move([model.address])
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
    client.request("POST", "/", body="x", headers={PROXY_HEADER: "mine"})
    assert client.getresponse().status == 200
    assert model.secrets == [front.secret]


def test_a_request_whose_replica_dies_goes_to_another(start: Start, models: Models) -> None:
    front, port = start(2)
    one, other = models("one"), models("other")
    backend = front.move([one.address, other.address])
    assert {ask(port) for _ in range(8)} == {"one", "other"}
    front.enter(backend, 0, None)
    assert {ask(port) for _ in range(4)} == {"other"}


def test_a_request_whose_replica_dies_waits_for_what_takes_its_place(start: Start, models: Models) -> None:
    front, port = start(1)
    dying, other = models("dying"), models("other")
    dying.dies = True
    backend = front.move([dying.address])
    with ThreadPoolExecutor() as threads:
        begun = threads.submit(ask, port)
        wait_for(lambda: len(dying.secrets) == 1)
        front.enter(backend, 0, None)
        dying.go.set()
        late = threads.submit(ask, port)
        wait_for(lambda: front.num_requests(backend) == 2)
        front.enter(backend, 0, other.address)
        assert (begun.result(), late.result()) == ("other", "other")


def test_tokens_pass_as_they_come(start: Start, models: Models) -> None:
    front, port = start(1)
    model = models("first")
    front.move([model.address])
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
    client.request("POST", "/slow", body="x")
    answer = client.getresponse()
    assert answer.read(5) == b"first"
    model.go.set()
    assert answer.read() == b" to the end"


def test_a_client_that_leaves_ends_its_request(start: Start, models: Models) -> None:
    front, port = start(1)
    model = models("m")
    backend = front.move([model.address])
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
    client.request("POST", "/waits", body="x")
    wait_for(lambda: front.num_requests(backend) == 1)
    client.close()
    assert model.left.wait(WAIT_SECONDS)


def test_it_goes_on_as_it_was_when_it_died(start: Start, models: Models) -> None:
    front, port = start(1)
    front.move([models("old").address])
    front.move([models("new").address])
    assert not front.restart_if_dead()
    front._process.kill()
    front._process.wait()
    assert front.restart_if_dead()
    assert ask(port) == "new"


def test_it_stops_with_its_last_answer(start: Start, models: Models) -> None:
    front, port = start(1)
    model = models("m")
    backend = front.move([model.address])
    with ThreadPoolExecutor() as threads:
        begun = threads.submit(ask, port, "/slow")
        wait_for(lambda: front.num_requests(backend) == 1)
        stopped = threads.submit(front.stop, WAIT_SECONDS)

        def refused() -> bool:
            try:
                ask(port)
            except OSError:
                return True
            return False

        wait_for(refused)
        assert not stopped.done()
        model.go.set()
        assert begun.result() == "m to the end"
        stopped.result()


def test_a_port_that_is_taken_is_refused(start: Start, tmp_path: Path) -> None:
    _, port = start(1)
    with pytest.raises(NotServedError, match=f"HAProxy cannot listen on 127.0.0.1:{port}"):
        ReverseProxy("127.0.0.1", port, 1, tmp_path / "second.log")


def asked_by(port: int, **headers: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
    connection.request("POST", "/", b"{}", {name.replace("_", "-"): value for name, value in headers.items()})
    return connection.getresponse().read().decode()


def drawn(sha256: str, who: str, share: float) -> bool:
    """The rule, computed without HAProxy."""
    return int.from_bytes(hashlib.sha256(f"{sha256}:{who}".encode()).digest()[:4]) < share * 2**32


def test_a_canary_gets_its_share_of_users_and_the_champion_answers_for_a_dead_one(
    models: Callable[[str], Model], tmp_path: Path
) -> None:
    port, champion, candidate = free_port(), models("champion"), models("candidate")
    proxy = ReverseProxy("127.0.0.1", port, 1, tmp_path / "log")
    people, first, second = [f"user {n}" for n in range(400)], "a" * 64, "b" * 64
    try:
        proxy.move([champion.address])
        proxy.begin_canary(first, [candidate.address], 0.25)
        mine = next(who for who in people if drawn(first, who, 0.25))
        wait_for(lambda: asked_by(port, x_xray_user=mine) == "candidate")
        answered = {who: asked_by(port, x_xray_user=who) for who in people}
        assert {who for who, by in answered.items() if by == "candidate"} == {
            w for w in people if drawn(first, w, 0.25)
        }
        # Binomial, n = 400, p = 1/4: 100 ± 4 standard deviations of 8.7.
        assert 65 <= list(answered.values()).count("candidate") <= 135
        assert {who: asked_by(port, x_xray_user=who) for who in people[:40]} == {w: answered[w] for w in people[:40]}
        # A user keeps the model in all conversations; without a user the conversation decides; without both nobody.
        assert asked_by(port, x_xray_user=mine, x_xray_conversation="another") == "candidate"
        assert asked_by(port, x_xray_conversation=mine) == "candidate"
        assert {asked_by(port) for _ in range(20)} == {"champion"}
        assert asked_by(port, x_xray_canary=first) == "champion"
        # HAProxy comes back as it was.
        proxy._process.kill()
        proxy._process.wait()
        proxy.restart_if_dead()
        wait_for(lambda: asked_by(port, x_xray_user=mine) == "candidate")
        candidate.shutdown()
        candidate.server_close()
        assert {asked_by(port, x_xray_user=who) for who in people[:60]} == {"champion"}
        proxy.end_canary()
        assert {asked_by(port, x_xray_user=who) for who in people[:60]} == {"champion"}
    finally:
        proxy.stop(1)
    assert {w for w in people if drawn(first, w, 0.25)} != {w for w in people if drawn(second, w, 0.25)}
