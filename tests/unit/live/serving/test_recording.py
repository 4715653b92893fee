"""Beside the answers: what is copied, that answers stay as they are, and what happens while the recorder is away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.live.serving.recording import MODEL, exchange
from xray_runtime.live.serving import recording
from xray_runtime.live.serving.config import RecordingConfig
from xray_runtime.live.serving.exchange import Exchange, texts_of
from xray_runtime.live.serving.middleware import PROXY_HEADER, Tagged, key_digest
from xray_runtime.live.serving.recording import ANSWER_HEADER, FEEDBACK_PATH, Outbox, RecordingMiddleware

CHAT = "/v1/chat/completions"
AGREED = {"x_xray_record": "yes"}


class Store:
    """What a recorder would keep; `away`: as one that was killed."""

    def __init__(self, away: bool = False) -> None:
        self.kept: list[Exchange] = []
        self.lost: list[dict[str, int]] = []
        self.feedback: list[tuple[bytes, str]] = []
        self.away = away

    async def keep(self, batch: list[Exchange], lost: Mapping[str, int], now: bool) -> Mapping[str, int]:
        if self.away:
            raise ConnectionError("the actor died")
        self.kept += batch
        self.lost.append(dict(lost))
        return {}

    async def take(self, body: bytes, key: str) -> tuple[int, dict[str, Any]]:
        if self.away:
            raise ConnectionError("the actor died")
        self.feedback.append((body, key))
        return 200, {"kept": True}


class Counts:
    def __init__(self) -> None:
        self.of: dict[tuple[str, str], int] = {}

    def __call__(self, name: str, reason: str, number: int) -> None:
        self.of[name, reason] = self.of.get((name, reason), 0) + number


async def engine(scope: Any, receive: Any, send: Any) -> None:
    """Reads the request, answers it with its id and its body."""
    body = (await receive())["body"]
    identity = dict(scope["headers"]).get(b"x-request-id", b"").decode()
    usage = SimpleNamespace(prompt_tokens=5, completion_tokens=2)
    scope["state"]["request_metadata"] = SimpleNamespace(final_usage_info=usage)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps({"id": identity}).encode(), "more_body": True})
    await send({"type": "http.response.body", "body": body})


async def asked(
    app: Any, path: str = CHAT, body: bytes = b"{}", method: str = "POST", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await app({"type": "http", "method": method, "path": path, "headers": given, "state": {}}, receive, send)
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, b"".join(message["body"] for message in sent[1:])


def middleware(store: Store, outbox: Outbox, app: Any = engine, **config: Any) -> RecordingMiddleware:
    return RecordingMiddleware(app, MODEL, RecordingConfig(**config), outbox, store.take)


def recorded(
    store: Store,
    count: Counts | None = None,
    times: int = 1,
    app: Any = engine,
    path: str = CHAT,
    body: bytes = b"{}",
    headers: Mapping[str, str] | None = None,
    **config: Any,
) -> tuple[int, dict[str, str], bytes]:
    """The answer to the last of some requests, once all that is recorded of them is in the store."""

    async def run() -> tuple[int, dict[str, str], bytes]:
        outbox = Outbox(store.keep, count or Counts())
        try:
            for _ in range(times):
                answer = await asked(middleware(store, outbox, app, **config), path, body, **(headers or AGREED))
        finally:
            await outbox.drain()
        return answer

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("routes", "path", "header", "is_kept"),
    [
        ((), CHAT, {}, False),
        ((), CHAT, {"x_xray_record": "yes"}, True),
        ((), CHAT, {"x_xray_record": "no"}, False),
        ((), CHAT, {"x_xray_record": "maybe"}, False),
        ((CHAT,), CHAT, {}, True),
        ((CHAT,), CHAT, {"x_xray_record": "no"}, False),
        ((CHAT,), "/v1/completions", {}, False),
        ((), "/v1/models", {"x_xray_record": "yes"}, False),
    ],
)
def test_only_people_who_agreed_are_recorded(
    routes: tuple[str, ...], path: str, header: dict[str, str], is_kept: bool
) -> None:
    store = Store()
    _, headers, _ = recorded(store, path=path, headers=header or {"accept": "*"}, routes=routes)
    assert (ANSWER_HEADER in headers) == is_kept
    assert len(store.kept) == is_kept


def test_a_copy_has_what_was_asked_answered_and_measured() -> None:
    store, counts = Store(), Counts()
    given = AGREED | {"x_xray_user": "ann", "x_xray_application": "shop", "x_request_id": "mine"}
    status, headers, body = recorded(store, counts, body=b'{"messages": []}', headers=given)
    [kept] = store.kept
    # The answer's own id is that of the record, whatever id the client gave.
    assert body == json.dumps({"id": kept.id}).encode() + b'{"messages": []}'
    assert (status, headers) == (200, {"content-type": "application/json", ANSWER_HEADER: kept.id})
    assert (kept.model, kept.user, kept.application, kept.route) == (MODEL, "ann", "shop", CHAT)
    assert (kept.request, kept.answer, kept.complete, kept.streamed) == (b'{"messages": []}', body, True, False)
    assert (kept.prompt_tokens, kept.reply_tokens) == (5, 2)
    assert 0 < kept.first_s <= kept.latency_s
    assert counts.of == {("kept", ""): 1}


def test_answers_go_on_while_the_recorder_is_away_and_losses_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_WAITING", 3)
    monkeypatch.setattr(recording, "BATCH_SECONDS", 0.0)
    monkeypatch.setattr(recording, "FIRST_WAIT_S", 0.01)
    store, counts = Store(away=True), Counts()

    async def run() -> None:
        outbox = Outbox(store.keep, counts)
        app = middleware(store, outbox)
        for _ in range(5):
            assert (await asked(app, x_xray_record="yes"))[0] == 200
            await asyncio.sleep(0.005)
        assert counts.of == {("lost", "outbox full"): 2}
        store.away = False
        await outbox.drain()
        # There is space again.
        await asked(app, x_xray_record="yes")
        await outbox.drain()

    asyncio.run(run())
    assert len({kept.id for kept in store.kept}) == len(store.kept) == 4
    # The store is told what was lost, once.
    assert [lost for lost in store.lost if lost] == [{"outbox full": 2}]
    assert counts.of == {("lost", "outbox full"): 2, ("kept", ""): 4}


def test_a_copy_that_is_too_large_for_the_outbox_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_WAITING_BYTES", 100)
    store, counts = Store(), Counts()
    assert recorded(store, counts, body=b"x" * 101)[0] == 200
    assert (store.kept, counts.of) == ([], {("lost", "outbox full"): 1})


def test_an_answer_that_breaks_off_is_kept_as_far_as_it_came() -> None:
    store = Store()

    async def leaves(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        recorded(store, app=leaves)
    assert [(kept.answer, kept.complete) for kept in store.kept] == [(b"half", False)]


def test_refused_requests_are_not_recorded() -> None:
    store = Store()

    async def refuses(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    recorded(store, app=refuses)
    assert store.kept == []


def test_a_share_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    store, draws = Store(), iter([0.1, 0.29, 0.3, 0.9])
    monkeypatch.setattr(recording.random, "random", lambda: next(draws))
    recorded(store, times=4, sample=0.3)
    assert len(store.kept) == 2


def test_feedback_has_a_key_of_its_own() -> None:
    store = Store()

    async def run() -> list[int]:
        app = middleware(store, Outbox(store.keep, Counts()))
        tagged = Tagged(app, MODEL, key_digest("inference"), "secret", own_keys=(FEEDBACK_PATH,))
        front = {PROXY_HEADER.replace("-", "_"): "secret"}
        found = [
            await asked(tagged, FEEDBACK_PATH, b"{}", authorization="Bearer shop", **front),
            await asked(tagged, FEEDBACK_PATH, b"{}", authorization="Bearer shop"),
            await asked(tagged, CHAT, b"{}", authorization="Bearer shop", **front),
            await asked(tagged, FEEDBACK_PATH, b"{}", method="GET", **front),
            await asked(tagged, FEEDBACK_PATH, b"x" * (recording.MAX_FEEDBACK_BYTES + 1), **front),
        ]
        store.away = True
        found.append(await asked(tagged, FEEDBACK_PATH, b"{}", authorization="Bearer shop", **front))
        return [status for status, _, _ in found]

    assert asyncio.run(run()) == [200, 401, 401, 405, 413, 503]
    # The recorder gets the key's digest.
    assert store.feedback == [(b"{}", key_digest("shop"))]


def chunks(*events: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def test_a_streamed_chat_is_put_together_as_it_would_have_come_whole() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"content": "it is"}, {"content": " fine"}]
    parts = [{"index": 0, "id": "c1", "type": "function", "function": {"name": "day", "arguments": ""}}]
    more = [[{"index": 0, "function": {"arguments": '{"x":'}}], [{"index": 0, "function": {"arguments": " 1}"}}]]
    events: list[Any] = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events += [{"choices": [{"index": 1, "delta": {"tool_calls": calls}}]} for calls in (parts, *more)]
    events += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": {}}]
    found = texts_of(exchange(1, streamed=True, answer=chunks(*events)))["answer"]["choices"]
    call = {"id": "c1", "type": "function", "function": {"name": "day", "arguments": '{"x": 1}'}}
    assert found == [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "it is fine"}},
        {"index": 1, "finish_reason": None, "message": {"role": "assistant", "content": None, "tool_calls": [call]}},
    ]


def test_streams_of_the_other_routes_are_put_together() -> None:
    events = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in ("a", "b")]
    kept = exchange(1, streamed=True, route="/v1/completions", answer=chunks(*events))
    assert texts_of(kept)["answer"]["choices"] == [{"index": 0, "finish_reason": None, "text": "ab"}]

    deltas = [{"type": "response.output_text.delta", "delta": text} for text in ("a", "b")]
    done = {"type": "response.completed", "response": {"id": "r", "output": [{"type": "message"}]}}
    stream = b"".join(b"event: x\ndata: " + json.dumps(event).encode() + b"\n\n" for event in (*deltas, done))
    responses = {"streamed": True, "route": "/v1/responses"}
    assert texts_of(exchange(1, answer=stream, **responses))["answer"] == {"output": [{"type": "message"}]}
    # Cut off in the middle of its last event.
    broken_off = texts_of(exchange(1, answer=stream[:-20], complete=False, **responses))
    assert broken_off["answer"]["output"][0]["content"][0]["text"] == "ab"
