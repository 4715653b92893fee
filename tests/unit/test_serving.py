"""Around a served model: the key, the tag on every answer, and which replicas are asked."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from xray_runtime.serving.middleware import SHA256_HEADER, Tagged, key_digest
from xray_runtime.serving.router import generation_to_ask

SHA = "ab" * 32


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    for part in (b"one", b"two"):
        await send({"type": "http.response.body", "body": part, "more_body": part != b"two"})


def _ask(path: str, key: str | None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    given = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "headers": given}
    asyncio.run(Tagged(_answer, SHA, key)(scope, None, send))  # type: ignore[arg-type]
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, b"".join(message["body"] for message in sent[1:])


def test_every_answer_says_which_model_it_comes_from() -> None:
    status, headers, body = _ask("/v1/models", None)
    assert (status, body) == (200, b"onetwo")
    assert headers == {"content-type": "text/plain", SHA256_HEADER: SHA}


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer wrong", "Basic right", "right", "Bearer right right"])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/tokenize", "/health/"])
def test_without_the_key_nothing_is_answered(path: str, given: str) -> None:
    status, headers, body = _ask(path, key_digest("right"), authorization=given)
    assert status == 401
    assert json.loads(body)["error"]["code"] == 401
    assert headers[SHA256_HEADER] == SHA


def test_the_key_opens_and_health_needs_none() -> None:
    for scheme in ("Bearer", "bearer"):
        assert _ask("/v1/models", key_digest("right"), authorization=f"{scheme} right")[0] == 200
    assert _ask("/health", key_digest("right"))[0] == 200


def test_a_websocket_is_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    asyncio.run(Tagged(_answer, SHA, None)({"type": "websocket", "path": "/v1/realtime"}, None, send))  # type: ignore[arg-type]
    assert sent == ["websocket.close"]


@pytest.mark.parametrize(
    ("generations", "asked"),
    [
        ([0], 0),  # one of two came up first, and there is no other model
        ([0, 0], 0),
        ([0, 0, 1], 0),
        ([0, 1], 0),  # an old one made room; the new model is not whole
        ([0, 1, 1], 1),
        ([0, 0, 1, 1], 1),
        ([1], 1),  # one of the new has died, and no old one is left
        ([0, 0, 1, 2, 2], 2),
    ],
)
def test_requests_go_to_the_newest_model_that_is_whole(generations: list[int], asked: int) -> None:
    assert generation_to_ask(generations, num_replicas=2) == asked
