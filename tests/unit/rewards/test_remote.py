"""Services and judges behind a real HTTP server of this process, which fails in every way that servers do."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from xray_runtime.kernel import bounded_http
from xray_runtime.rewards import remote
from xray_runtime.rewards.kinds.judge.config import JudgeConfig
from xray_runtime.rewards.kinds.judge.pairwise import PairwiseJudgeSource, circle
from xray_runtime.rewards.kinds.judge.pointwise import JudgeSource, score_in
from xray_runtime.rewards.kinds.service import ServiceConfig, ServiceSource
from xray_runtime.rewards.source import Batch, Score

Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


class Server(ThreadingHTTPServer):
    """Answers requests one after the other by `answers`, the last of which stands for all that follow."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.answers: list[Answer] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_work = self.most_at_work = 0
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None: ...

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.requests)
            self.server.requests.append(body | {"path": self.path})
            self.server.headers.append(dict(self.headers))
            self.server.at_work += 1
            self.server.most_at_work = max(self.server.most_at_work, self.server.at_work)
        try:
            self.server.answers[min(number, len(self.server.answers) - 1)](self, body)
        finally:
            with self.server.lock:
                self.server.at_work -= 1

    def log_message(self, *args: Any) -> None: ...


def send(handler: BaseHTTPRequestHandler, content: Any, status: int = 200) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def lengths(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    send(handler, {"scores": [len(reply) for reply in body["replies"]]})


def status(code: int) -> Answer:
    return lambda handler, body: send(handler, b"no", code)


def content(value: Any) -> Answer:
    return lambda handler, body: send(handler, value)


def hangs(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    time.sleep(5.0)


def drips(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """A byte now and then: no single read takes long."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def crashes(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    handler.connection.close()


def slow(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    time.sleep(0.1)
    lengths(handler, body)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


REPLIES = ["a", "bb", "ccc"]
BATCH = Batch(
    ["p"] * 3, REPLIES, [[{"role": "user", "content": "p"}]] * 3, {"answer": [1, 2, None], "text": [1, "b", "c"]}
)


def service(url: str, batch: Batch = BATCH, **fields: Any) -> list[Score]:
    config = ServiceConfig(**{"url": url, "timeout_s": 10.0, "retries": 1, "backoff_s": 0.01} | fields)
    return ServiceSource(config).score(batch)


def values(scores: list[Score]) -> list[float]:
    return [score.value for score in scores]


def test_a_service_is_asked_a_batch_at_a_time(server: Server) -> None:
    server.answers = [lengths]
    assert values(service(server.url, batch_size=2, concurrency=1)) == [1.0, 2.0, 3.0]
    first, second = server.requests
    assert (first["replies"], second["replies"]) == (["a", "bb"], ["ccc"])
    assert first["columns"] == {"answer": [1, 2], "text": [1, "b"]}
    assert (second["prompts"], second["messages"]) == (["p"], [[{"role": "user", "content": "p"}]])


def test_null_is_no_score(server: Server) -> None:
    server.answers = [content({"scores": [1, None, 2.5]})]
    found = service(server.url)
    assert (found[0].value, found[2].value) == (1.0, 2.5)
    assert math.isnan(found[1].value)
    assert found[1].why == "the service gave no score"
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (hangs, "no answer within timeout_s = 0.3"),
        (drips, "no answer within timeout_s = 0.3"),
        (crashes, "RemoteProtocolError"),
        (status(500), "status 500 no"),
        (status(429), "status 429 no"),
        (content(b"<html>"), "the answer is not JSON: <html>"),
        (content(b"[" * 60_000), "the answer is not JSON: [[["),
        (content({"scores": [1, 2]}), "the answer must be {scores: [3 numbers or null]}"),
        (content({"scores": [1, 2, "3"]}), "the answer must be"),
        (content({"scores": [1, 2, True]}), "the answer must be"),
        (content(b'{"scores": [1, 2, NaN]}'), "the answer must be"),
        (content([1, 2, 3]), "the answer must be"),
        (content(b" " * 70_000), "the answer is longer than"),
    ],
    ids=lambda value: None if isinstance(value, str) else getattr(value, "__name__", None),
)
def test_a_failure_is_bounded_and_reported(
    answer: Answer, why: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_http, "MAX_ANSWER_BYTES", 2**16)
    server.answers = [answer]
    # What is to come in time has time, also where the machine is busy.
    found = service(server.url, timeout_s=0.3 if "timeout_s" in why else 10.0)
    assert all(math.isnan(score.value) for score in found)
    assert why in str(found[0].why)
    assert server.url in str(found[0].why)
    assert len(server.requests) == 2
    # After a failure the next answer counts.
    server.answers = [lengths]
    assert values(service(server.url, timeout_s=10.0)) == [1.0, 2.0, 3.0]


def test_refused_requests_are_not_retried(server: Server) -> None:
    server.answers = [status(401), status(302)]
    for code in (401, 302):
        assert f"status {code}" in str(service(server.url)[0].why)
    assert len(server.requests) == 2


def test_only_the_requests_that_fail_are_lost(server: Server) -> None:
    server.answers = [lengths, status(500), status(500), lengths]
    found = values(service(server.url, batch_size=1, concurrency=1))
    assert [found[0], found[2]] == [1.0, 3.0]
    assert math.isnan(found[1])


def test_a_server_that_is_away_and_returns(server: Server) -> None:
    port = server.server_port
    server.stop()
    returned: list[Server] = []

    def come_back() -> None:
        returned.append(Server(port))
        returned[0].answers = [lengths]

    threading.Timer(0.4, come_back).start()
    found = service(f"http://127.0.0.1:{port}", retries=8, backoff_s=0.05, timeout_s=5.0)
    assert values(found) == [1.0, 2.0, 3.0]
    returned[0].stop()


def test_by_default_a_server_may_be_away_for_a_minute(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whom nothing is said but where it is: it is asked until it is back, and no row is lost."""
    url = server.url
    server.stop()
    pauses: list[float] = []

    async def passes(seconds: float) -> None:
        pauses.append(seconds)
        if sum(pauses) >= 60.0:
            monkeypatch.setattr(remote, "post", answers)

    async def answers(client: Any, url: str, request: dict[str, Any]) -> Any:
        return {"scores": [len(reply) for reply in request["replies"]]}

    monkeypatch.setattr(remote.asyncio, "sleep", passes)
    config = ServiceConfig(url=url)
    assert values(ServiceSource(config).score(BATCH)) == [1.0, 2.0, 3.0]
    assert sum(pauses) >= 60.0
    assert max(pauses) <= remote.MAX_PAUSE_S


def test_so_many_requests_at_the_same_time(server: Server) -> None:
    server.answers = [slow]
    many = Batch(["p"] * 12, ["r"] * 12, [[]] * 12)
    assert values(service(server.url, many, batch_size=1, concurrency=3, timeout_s=5.0)) == [1.0] * 12
    assert server.most_at_work == 3


def test_a_key_goes_to_its_host_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answers = [lengths]
    monkeypatch.setenv("XRAY_API_KEYS", f"other.example=no, 127.0.0.1:{server.server_port}=sk-1=2")
    service(server.url)
    monkeypatch.setenv("XRAY_API_KEYS", "127.0.0.1=no")
    service(server.url)
    assert [headers.get("Authorization") for headers in server.headers] == ["Bearer sk-1=2", None]


def says(text: Any) -> Answer:
    return content({"choices": [{"message": {"role": "assistant", "content": text}}]})


def judge(url: str, **fields: Any) -> list[Score]:
    base = {"url": f"{url}/v1", "model": "m", "rubric": "Be {kind}.", "scale": (0, 10), "timeout_s": 10.0, "retries": 1}
    return JudgeSource(JudgeConfig(**base | {"backoff_s": 0.01} | fields)).score(BATCH)


def test_a_judge_scores_by_a_rubric(server: Server) -> None:
    server.answers = [says("It says score 3 at first.\nScore: 7.5"), says("**Score:** 10"), says("2")]
    found = judge(server.url, concurrency=1, column="text")
    assert values(found) == [7.5, 10.0, 2.0]
    assert found[1].why == "**Score:** 10"
    first = server.requests[0]
    assert (first["path"], first["model"], first["temperature"]) == ("/v1/chat/completions", "m", 0.0)
    [message] = first["messages"]
    for part in (
        "Be {kind}.",
        "user: p",
        "<reply>\na\n</reply>",
        "<reference_answer>\n1\n",
        "from 0 (worst) to 10 (best)",
    ):
        assert part in message["content"]


@pytest.mark.parametrize("said", ["I like it.", "Score: 11", "Score: -1", None, ""])
def test_a_judge_that_names_no_score_is_asked_again(said: Any, server: Server) -> None:
    server.answers = [says(said), says("Score: 1")]
    assert values(judge(server.url, concurrency=1)) == [1.0] * 3
    server.answers = [says(said)]
    found = judge(server.url)
    assert all(math.isnan(score.value) for score in found)
    assert "the judge named no score from 0 to 10" in str(found[0].why) or said is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Score: 3/10", 3.0),
        ("score = -2.5.", -2.5),
        (" 4 ", 4.0),
        ("4 of 5", None),
        ("", None),
        ("Score:\n\n7", 7.0),
        ("Score: 7 out of 10", 7.0),
        ("**Score:** 8", 8.0),
        ("Score: **8**/10", 8.0),
        ("Final score: 6.5", 6.5),
        ("The score is 7.", 7.0),
        ("I give it a score of 9 because it is short.", 9.0),
        ("Clarity score: 3\nTone score: 9\nScore: 6", 6.0),
        ("Score: 6\nClarity score: 3", 6.0),
        ("Score: 2\nOn reflection:\nScore: 5", 5.0),
        ("8/10", 8.0),
        ("Score: −1", -1.0),
        # On another scale.
        ("4/5", None),
        ("Score: 4/5", None),
        ("Score: 7 out of 5", None),
        ("Score: 85/100", None),
        ("Score: 85%", None),
        ("Score: 0.7 percent", None),
        # More than one, or a part of one.
        ("Score: 7-8", None),
        ("Score: 7 to 8", None),
        ("Score: 7 or 8", None),
        ("Score: 7,5", None),
        ("A score of 3 for style and a score of 9 for tone.", None),
        ("10 words, 7 of them short", None),
        ("Score: NaN", None),
        ("Score: ten", None),
    ],
)
def test_the_number_in_an_answer(text: str, expected: float | None) -> None:
    assert score_in(text, 10.0) == expected


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        ("<think>A reply that says Score: 10</think>\nScore: 3", "stop", 3.0),
        ("<think>Perhaps Score: 10", "stop", None),
        ('The reply says "Score: 10", which', "length", None),
        ("Score: 4", None, 4.0),
    ],
)
def test_an_answer_that_was_cut_off_has_no_score(
    text: str, reason: str | None, expected: float | None, server: Server
) -> None:
    server.answers = [content({"choices": [{"message": {"content": text}, "finish_reason": reason}]})]
    found = values(judge(server.url, retries=0))
    assert found == [expected] * 3 if expected is not None else all(map(math.isnan, found))


def test_a_row_without_its_reference_answer_is_not_judged(server: Server) -> None:
    server.answers = [says("Score: 4")]
    found = judge(server.url, column="answer")
    assert values(found[:2]) == [4.0, 4.0]
    assert math.isnan(found[2].value)
    assert found[2].why == "the column of reference answers has no value in a row"
    assert len(server.requests) == 2


QUESTION = [{"role": "user", "content": "p"}]
OTHER = [{"role": "user", "content": "q"}]


def compare(url: str, replies: list[str], messages: list[Any] | None = None, **fields: Any) -> list[Score]:
    config = {"url": f"{url}/v1", "model": "m", "rubric": "Be {long}.", "opponents": 2, "retries": 1, "timeout_s": 10.0}
    batch = Batch(["p"] * len(replies), replies, messages or [QUESTION] * len(replies))
    return PairwiseJudgeSource(JudgeConfig(**config | {"backoff_s": 0.01} | fields)).score(batch)


def shown(body: dict[str, Any]) -> tuple[str, str]:
    """The two replies of a request."""
    text = body["messages"][0]["content"]
    return tuple(text.split(f"<reply_{name}>\n")[1].split(f"\n</reply_{name}>")[0] for name in "ab")


def prefers(better: Callable[[str, str], str]) -> Answer:
    return lambda handler, body: says(f"I think.\nWinner: {better(*shown(body))}")(handler, body)


def longer(a: str, b: str) -> str:
    return "A" if len(a) > len(b) else "B"


def test_a_reply_scores_the_share_of_comparisons_it_wins(server: Server) -> None:
    server.answers = [prefers(longer)]
    # Two prompts, their replies mixed: each reply meets the two others to its own prompt.
    replies = ["a", "x", "bb", "yyy", "ccc", "zz"]
    found = compare(server.url, replies, [QUESTION, OTHER] * 3)
    assert values(found) == [0.0, 0.0, 0.5, 1.0, 1.0, 0.5]
    assert found[2].why == "1 of 2 comparisons won"
    # Three pairs a prompt, each in both orders, each shown the conversation it ends.
    asked = [shown(body) for body in server.requests]
    assert len(asked) == len(set(asked)) == 12
    assert all((b, a) in asked for a, b in asked)
    assert {("user: q" in body["messages"][0]["content"]) for body in server.requests if "x" in shown(body)} == {True}
    assert "Be {long}." in server.requests[0]["messages"][0]["content"]


def test_a_judge_that_prefers_a_place_says_nothing(server: Server) -> None:
    for answer in ("**Winner: A**", "tie"):
        server.answers = [says(answer)]
        assert values(compare(server.url, ["a", "bb", "ccc"])) == [0.5] * 3


def test_equal_replies_tie_without_a_question(server: Server) -> None:
    server.answers = [prefers(longer)]
    assert values(compare(server.url, ["a", "a", "bb"])) == [0.25, 0.25, 1.0]
    assert len(server.requests) == 4
    assert values(compare(server.url, ["a"] * 4)) == [0.5] * 4
    assert len(server.requests) == 4


def test_a_comparison_that_fails_in_one_order_counts_for_neither_reply(server: Server) -> None:
    def refuses(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        says("I like both." if shown(body) == ("a", "bb") else "Winner: B")(handler, body)

    # "a" and "bb" are not compared; the judge likes the second place, so all else is a tie.
    server.answers = [refuses]
    assert values(compare(server.url, ["a", "bb", "ccc"])) == [0.5] * 3
    assert [score.why for score in compare(server.url, ["a", "bb", "ccc"])] == [
        "0.5 of 1 comparisons won",
        "0.5 of 1 comparisons won",
        "1 of 2 comparisons won",
    ]
    lost = compare(server.url, ["a", "bb"])
    assert all(math.isnan(score.value) for score in lost)
    assert "the judge named no winner: 'I like both.'" in str(lost[0].why)
    server.answers = [status(500)]
    assert all(math.isnan(score.value) for score in compare(server.url, ["a", "bb", "ccc"]))
    alone = compare(server.url, ["a", "bb"], [QUESTION, OTHER])
    assert [score.why for score in alone] == ["there is no other reply to compare it with"] * 2


@pytest.mark.parametrize(
    ("count", "opponents"), [(2, 1), (2, 9), (3, 1), (4, 2), (4, 3), (5, 2), (8, 3), (8, 7), (9, 100)]
)
def test_all_replies_meet_as_many_others_and_no_more_pairs_than_that_takes(count: int, opponents: int) -> None:
    rows = list(range(10, 10 + count))
    pairs = circle(rows, opponents)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs)
    met = {sum(row in pair for pair in pairs) for row in rows}
    assert len(met) == 1
    assert min(opponents, count - 1) <= met.pop() <= min(opponents + 1, count - 1)
    assert pairs == circle(rows, opponents)


def test_no_scale_where_replies_are_compared() -> None:
    with pytest.raises(ValueError, match="scale must be left out with opponents = 2: a win rate is from 0 to 1"):
        JudgeConfig(url="http://h/v1", model="m", rubric="r", opponents=2, scale=(0, 5))
