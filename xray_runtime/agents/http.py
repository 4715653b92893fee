"""The gateway's HTTP interface: each episode has an address and a secret of its own.

    /episodes/ID/v1/chat/completions | completions | responses | messages     answers of the policy
    /episodes/ID/v1/models                                                    the one model, `policy`
    /episodes/ID/reward                                                       the episode's result (`posted`)

A stream is sent after the whole reply was sampled and journaled, so a client that stops reading changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

from xray_runtime.agents import chat, completions, messages, responses
from xray_runtime.agents.episode import AgentEpisode, GeneratorFailedError
from xray_runtime.agents.pictures import RequestPictures
from xray_runtime.agents.posted import read_posted
from xray_runtime.agents.request import OVER, AgentReply, RefusedError, Request
from xray_runtime.agents.spans import Spans, note_replies, note_request
from xray_runtime.agents.threads import in_thread
from xray_runtime.kernel.request_bodies import parse_body

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY_BYTES = 16 * 2**20
RETRIES = b"x-stainless-retry-count"
"""Header in which SDKs count the repetitions of a request."""


class Dialect(Protocol):
    """A module that speaks one API."""

    def read(self, body: Any, temperature: float, pictures: RequestPictures | None = None) -> Request: ...

    def answer(self, replies: Sequence[AgentReply]) -> dict[str, Any]: ...

    def events(self, whole: dict[str, Any]) -> Iterator[chat.Event]: ...


DIALECTS: dict[str, Dialect] = {
    "chat/completions": chat,
    "completions": completions,
    "responses": responses,
    "messages": messages,
}
MODELS = {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "xray"}]}


class AgentApp:
    """An ASGI application.

    Args:
        episodes: the open episodes by their id, and those that ended.
        spans: OpenTelemetry's spans of calls; None: none are kept.
    """

    def __init__(self, episodes: Mapping[str, AgentEpisode], spans: Spans | None = None) -> None:
        self._episodes, self._spans = episodes, spans

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            episode, path = self._find(scope)
            await self._route(episode, path, scope, receive, send)
        except RefusedError as error:
            await _send_error(send, scope, error.status, str(error), error.code)
        except GeneratorFailedError as error:
            await _send_error(send, scope, 503, str(error), None)
        except Exception:
            log.exception("a call to the gateway failed")
            await _send_error(send, scope, 500, "the gateway failed", None)

    def _find(self, scope: Message) -> tuple[AgentEpisode, str]:
        parts = [part for part in scope["path"].split("/") if part]
        episode = self._episodes.get(parts[1]) if parts[:1] == ["episodes"] and len(parts) > 2 else None
        given = _secret(scope["headers"])
        # An unknown episode and a wrong secret look the same.
        if episode is None or not secrets.compare_digest(given, episode.secret.encode()):
            raise RefusedError("there is no such episode, or the API key belongs to another one", 401)
        return episode, "/".join(parts[2:])

    async def _route(self, episode: AgentEpisode, path: str, scope: Message, receive: Receive, send: Send) -> None:
        if path == "v1/models":
            await _send_json(send, 200, MODELS)
            return
        dialect = DIALECTS.get(path.removeprefix("v1/"))
        if scope["method"] != "POST" or (dialect is None and path != "reward"):
            raise RefusedError(f"{scope['method']} {path!r} is not supported; POST: {', '.join(DIALECTS)}, reward", 404)
        body = await _body(receive)
        if dialect is None:
            await self._take_result(episode, body, send)
            return
        replies, stream = await self._spanned(episode, dialect, body, scope, receive, path)
        if replies is None:
            return
        answer = dialect.answer(replies)
        if not stream:
            await _send_json(send, 200, answer)
            return
        await send(_head(200, b"text/event-stream"))
        for name, data in dialect.events(answer):
            text = data if isinstance(data, str) else json.dumps(data)
            event = f"event: {name}\n" if name else ""
            await send({"type": "http.response.body", "body": f"{event}data: {text}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _take_result(self, episode: AgentEpisode, body: bytes, send: Send) -> None:
        try:
            episode.post(read_posted(await in_thread(_json, body)))
        except ValueError as error:
            refusal = error if isinstance(error, RefusedError) else RefusedError(str(error))
            episode.break_off(f"the agent posted no valid result: {error}")
            raise refusal from error
        await _send_json(send, 200, {"ended": episode.is_over})

    async def _spanned(
        self, episode: AgentEpisode, dialect: Dialect, body: bytes, scope: Message, receive: Receive, path: str
    ) -> tuple[list[AgentReply] | None, bool]:
        if self._spans is None:
            return await self._call(episode, dialect, body, scope, receive)
        with self._spans.call(episode.name, path) as span:
            with contextlib.suppress(RefusedError):
                note_request(span, _json(body))
            replies, stream = await self._call(episode, dialect, body, scope, receive)
            if replies is not None:
                note_replies(span, replies)
            return replies, stream

    async def _call(
        self, episode: AgentEpisode, dialect: Dialect, body: bytes, scope: Message, receive: Receive
    ) -> tuple[list[AgentReply] | None, bool]:
        """(replies, whether to stream them); no replies if the client went away."""
        try:
            # In a thread: others are answered meanwhile.
            given = await in_thread(_json, body)
            request = await in_thread(dialect.read, given, episode.temperature, episode.pictures)
            repeats = dict(scope["headers"]).get(RETRIES, b"0").strip() not in (b"", b"0")
            pending = episode.call(scope["path"], body, request, repeats)
            return await self._awaited(episode, pending, receive), bool(given.get("stream"))
        except ValueError as error:
            refusal = error if isinstance(error, RefusedError) else RefusedError(str(error))
            if refusal.status != OVER:
                episode.count("refused")
            raise refusal from error

    async def _awaited(
        self, episode: AgentEpisode, pending: asyncio.Future[list[AgentReply]], receive: Receive
    ) -> list[AgentReply] | None:
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((pending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if not pending.done():
            episode.leave(pending)
            return None
        if pending.cancelled():
            raise RefusedError("the episode is over", OVER)
        return pending.result()


def _secret(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    named = dict(headers)
    scheme, _, key = named.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else named.get(b"x-api-key", b"")


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise RefusedError(f"a request of more than {MAX_BODY_BYTES:,} bytes is not allowed", 413)
        if not message.get("more_body"):
            return bytes(body)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(body: bytes) -> Any:
    try:
        return parse_body(body)
    except ValueError as error:
        raise RefusedError(str(error)) from error


def _head(status: int, kind: bytes, *more: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *more]}


async def _send_json(send: Send, status: int, value: Any, *headers: tuple[bytes, bytes]) -> None:
    body = json.dumps(value).encode()
    await send(_head(status, b"application/json", (b"content-length", str(len(body)).encode()), *headers))
    await send({"type": "http.response.body", "body": body})


async def _send_error(send: Send, scope: Message, status: int, message: str, code: str | None) -> None:
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}.get(
        status, "invalid_request_error" if status < 500 else "api_error"
    )
    error: dict[str, Any] = {"type": kind, "message": message}
    is_anthropic = scope["path"].endswith("/messages")
    value = {"type": "error", "error": error} if is_anthropic else {"error": error | {"param": None, "code": code}}
    await _send_json(send, status, value, *([(b"retry-after", b"1")] if status == 503 else []))
