"""Request bodies that reach the engine's server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from xray_runtime.kernel.request_bodies import MAX_DEPTH
from xray_runtime.live.serving.json_bodies import JsonBodies
from xray_runtime.live.serving.middleware import ANSWERED_BY

JSON = [(b"content-type", b"application/json")]
SHA256S = {"base": "ab" * 32, "tuned": "cd" * 32}


def ask(body: bytes, headers: Any = JSON, method: str = "POST", ends: bool = True) -> tuple[int, bytes]:
    """(status, answer); the application answers with the body that it got."""
    parts = [body[start : start + 7_000] for start in range(0, len(body), 7_000)] or [b""]
    sent: list[Any] = []

    async def receive() -> Any:
        if not parts:
            return {"type": "http.disconnect"}
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts) or not ends}

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found, more = b"", True
        while more:
            message = await receive()
            more = message.get("more_body", False)
            found += message.get("body", b"")
        status = 499 if message["type"] == "http.disconnect" else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": found})

    scope = {"type": "http", "method": method, "headers": headers}
    asyncio.run(JsonBodies(app, SHA256S)(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def levels(number: int, begin: str = "[", end: str = "]") -> bytes:
    return (begin * number + "1" + end * number).encode()


REFUSED = [
    (levels(MAX_DEPTH + 1), "more than 64 levels"),
    (levels(900), "more than 64 levels"),
    (levels(900, '{"a":', "}"), "more than 64 levels"),
    (levels(100_000), "is not JSON"),
    (b'{"schema": ' + levels(300, '{"properties":', "}") + b"}", "more than 64 levels"),
    (b'["\\ud800"]', "a lone surrogate"),
    (b'{"\\udfff": 1}', "a lone surrogate"),
    (b'{"a": "\xff"}', "is not JSON"),
    (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
    (b"{", "is not JSON"),
    (b"nul", "is not JSON"),
    (b'{"a": 1} x', "is not JSON"),
]


@pytest.mark.parametrize(("body", "why"), REFUSED)
def test_odd_json_is_refused_in_one_line(body: bytes, why: str) -> None:
    for headers in (JSON, [], [(b"content-type", b"application/JSON; charset=utf-8")]):
        status, answer = ask(body, headers)
        assert status == 400
        message = json.loads(answer)["error"]["message"]
        assert why in message
        assert "\n" not in message


@pytest.mark.parametrize(
    "body", [b"", b"{}", levels(MAX_DEPTH), '{"a": "é🙂"}'.encode(), b'"\\ud83d\\ude42"', b"[" + b"1," * 50_000 + b"1]"]
)
def test_the_rest_arrives_byte_by_byte(body: bytes) -> None:
    assert ask(body) == (200, body)


def test_other_requests_and_clients_that_leave_pass() -> None:
    assert ask(levels(900), [(b"content-type", b"multipart/form-data")]) == (200, levels(900))
    assert ask(levels(900), method="PUT") == (200, levels(900))
    assert ask(b'{"a": 1}', ends=False) == (499, b'{"a": 1}')


@pytest.mark.parametrize(("body", "sha256"), [("{}", None), ('{"model": ""}', None), ('{"model": "tuned"}', "cd" * 32)])
def test_the_name_of_a_model_says_which_checkpoint_answers(body: str, sha256: str | None) -> None:
    noted: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        noted.append(scope.get(ANSWERED_BY))

    async def receive() -> Any:
        return {"type": "http.request", "body": body.encode()}

    async def send(message: Any) -> None: ...

    asyncio.run(JsonBodies(app, SHA256S)({"type": "http", "method": "POST", "headers": JSON}, receive, send))
    assert noted == [sha256]


def test_a_model_that_is_not_served_is_not_found() -> None:
    status, answer = ask(b'{"model": "other"}')
    assert (status, json.loads(answer)["error"]["message"]) == (
        404,
        "model: 'other' is not allowed: must be one of 'base', 'tuned'",
    )
