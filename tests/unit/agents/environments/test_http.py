"""An environment behind a real HTTP server of this process, which also answers what it should not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from tests.unit.agents.answering import Answering
from xray_runtime.agents.environments import http
from xray_runtime.agents.environments.episodes import EnvironmentFailure
from xray_runtime.agents.environments.http import from_http
from xray_runtime.agents.environments.pool import EnvironmentPool
from xray_runtime.kernel import bounded_http
from xray_runtime.methods.common.environment_protocol import Start, Step

URL = "XRAY_TEST_ENVIRONMENT_URL"
OBSERVED = [{"role": "user", "content": "and?"}]


class Server(ThreadingHTTPServer):
    """Adds up the numbers that an episode is told; `answer` stands in place of every answer to a step."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.sums: dict[str, int] = {}
        self.asked: list[tuple[str, Any]] = []
        self.answer: tuple[Any, ...] | None = None
        self.delay_s = 0.0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None: ...


class Handler(Answering):
    server: Server

    def do_POST(self) -> None:
        body = self.body()
        self.server.asked.append((self.path, body | {"key": self.headers["Authorization"]}))
        sums = self.server.sums
        if self.path == "/game/reset":
            name = f"e/{len(sums)}"
            sums[name] = body["seed"]
            self.answer({"episode": name, "messages": [{"role": "user", "content": body["task"]["prompt"]}]})
        elif self.server.answer is not None:
            time.sleep(self.server.delay_s)
            self.answer(*self.server.answer)
        else:
            sums[body["episode"]] += int(body["reply"])
            total = sums[body["episode"]]
            self.answer({"messages": OBSERVED, "reward": total, "terminated": total > 9, "info": {"total": total}})

    def do_DELETE(self) -> None:
        self.server.asked.append((self.path, "DELETE"))
        self.answer(b"", 404)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server
        server.shutdown()


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}/game/"


def environment() -> Any:
    """For a process."""
    import os

    return from_http(os.environ[URL], timeout_s=5)()


async def played(url: str, *replies: str, timeout_s: float = 5) -> tuple[Start, list[Step]]:
    episode: Any = from_http(url, timeout_s)()
    try:
        start = await episode.reset({"prompt": "p", "answer": "5"}, 3)
        return start, [await episode.step(reply) for reply in replies]
    finally:
        await episode.close()


def test_an_episode(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XRAY_API_KEYS", f"127.0.0.1:{server.server_port}=secret")
    start, steps = asyncio.run(played(url_of(server), "4", "5"))
    assert start == Start([{"role": "user", "content": "p"}])
    assert steps == [Step(OBSERVED, 7, info={"total": 7}), Step(OBSERVED, 12, terminated=True, info={"total": 12})]
    key = {"key": "Bearer secret"}
    assert server.asked == [
        ("/game/reset", {"task": {"prompt": "p", "answer": "5"}, "seed": 3} | key),
        ("/game/step", {"episode": "e/0", "reply": "4"} | key),
        ("/game/step", {"episode": "e/0", "reply": "5"} | key),
        ("/game/e%2F0", "DELETE"),
    ]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            ({"done": True},),
            "/game/step: 'done' is not allowed: fields are messages, reward, terminated, truncated, info",
        ),
        (([1],), "/game/step: the answer is a list: must be a JSON object"),
        ((b"<html>",), "/game/step: the answer is not JSON: <html>"),
        ((b" " * 2000,), "/game/step: the answer is longer than 1000 bytes"),
        ((b"no", 500), "/game/step: status 500 no"),
    ],
)
def test_a_bad_answer_costs_its_episode(
    answer: Any, message: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_http, "MAX_ANSWER_BYTES", 1000)
    server.answer = answer
    with pytest.raises(ValueError, match=message) as caught:
        asyncio.run(played(url_of(server), "1"))
    assert "\n" not in str(caught.value)


def test_a_reset_names_its_episode(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, shown in (({}, "None"), ({"episode": 7}, "7"), ({"episode": ""}, "''")):
        monkeypatch.setattr(Handler, "do_POST", lambda self, answer=answer: self.answer(answer))
        with pytest.raises(ValueError, match=f"/game/reset: episode is {shown}: must be a name"):
            asyncio.run(played(url_of(server)))


def test_a_late_answer(server: Server) -> None:
    server.answer, server.delay_s = ({"reward": 1},), 1.0
    with pytest.raises(ValueError, match=r"/game/step: no answer within timeout_s = 0\.2"):
        asyncio.run(played(url_of(server), "1", timeout_s=0.2))
    assert [path for path, _ in server.asked].count("/game/step") == 1


def test_a_server_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be sent is sent again; then the episode is lost."""
    server = Server()
    url, port = url_of(server), server.server_port
    server.shutdown()
    server.server_close()
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2 and back:
            again.append(Server(port))

    monkeypatch.setattr(http.asyncio, "sleep", sleep)
    again: list[Server] = []
    back = False
    with pytest.raises(ValueError, match="/game/reset: All connection attempts failed"):
        asyncio.run(played(url))
    assert pauses == [0.5, 1.0, 2.0]
    pauses.clear()
    back = True
    _, [step] = asyncio.run(played(url, "1"))
    assert (step.reward, len(pauses)) == (4, 2)
    again[0].shutdown()
    again[0].server_close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("ftp://host/x", "ftp://host/x"),
        ("http://", "http://"),
        ("http://me:secret@host/x", "http://host/x"),
        ("http://host/x?key=secret", "http://host/x"),
    ],
)
def test_addresses(url: str, shown: str) -> None:
    with pytest.raises(ValueError, match=r"must be http\(s\)://HOST/PATH, without a login or a query") as caught:
        from_http(url)
    assert repr(shown) in str(caught.value)
    assert "secret" not in str(caught.value)
    for timeout_s in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"timeout_s = .* is not allowed: must be above 0"):
            from_http("http://host", timeout_s)


def test_in_processes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad answer costs one episode; a process that dies begins its episodes again, on the server too."""
    monkeypatch.setenv(URL, url_of(server))
    with EnvironmentPool(f"{__name__}:environment", 1, 30, 4096) as pool:
        for number in range(2):
            pool.reset(number, {"prompt": "p"}, 3).result()
        server.answer = ({"reward": None},)
        with pytest.raises(EnvironmentFailure, match=r"Step\.reward is None: must be a finite number"):
            pool.step(1, "1").result()
        server.answer = None
        assert pool.step(0, "1").result().reward == 4
        process = pool._supervisors[0]._process
        assert process is not None
        process._process.kill()
        assert pool.step(0, "2").result().reward == 6
    resets = [path for path, _ in server.asked if path == "/game/reset"]
    assert len(resets) == 3
    assert server.sums["e/2"] == 6
