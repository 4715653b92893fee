"""Checks the key of every request, and adds the model's digest to every answer."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import ASGIApp as App, Message, Receive, Send

SHA256_HEADER = "x-xray-model-sha256"
PROXY_HEADER = "x-xray-front"
CANARY_HEADER = "x-xray-canary"
"""The reverse proxy sets it: the candidate's sha256, in requests that are randomly assigned."""
ANSWERED_BY = "xray.answered_by"
"""Key of a request's scope: sha256 of the checkpoint that answers it."""
OPEN_PATHS = ("/health",)
"""Load balancers request these paths without a key."""
MAX_BODY_BYTES = 4 * 2**20
"""Largest request: a million tokens of text, more than any served context."""


def key_digest(key: str) -> str:
    """A key's digest, which replicas hold instead of the key."""
    return hashlib.sha256(key.encode()).hexdigest()


class Tagged:
    """ASGI middleware. vLLM's own check of a key covers only paths that begin with /v1.

    Args:
        sha256: of the model; sent with every answer, errors included, unless `app` notes another in the scope
            (`ANSWERED_BY`).
        key: `key_digest` of the key that requests must contain (`Authorization: Bearer KEY`); None: they need no key.
        secret: value of the reverse proxy's `PROXY_HEADER`; requests without it are rejected.
        own_keys: paths for which `app` itself checks keys.
    """

    def __init__(self, app: App, sha256: str, key: str | None, secret: str, own_keys: tuple[str, ...] = ()) -> None:
        self._app, self._sha256, self._key, self._secret = app, sha256, key, secret.encode()
        self._open = (*OPEN_PATHS, *own_keys)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            # Text models have no websockets.
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        begun = False

        async def tagged(message: Message) -> None:
            nonlocal begun
            if refused:
                # The application reports that the client has left.
                return
            if message["type"] == "http.response.start":
                begun = True
                tag = (SHA256_HEADER.encode(), scope.get(ANSWERED_BY, self._sha256).encode())
                message = {**message, "headers": [*message.get("headers", []), tag]}
            await send(message)

        refused, size = False, 0

        async def bounded() -> Message:
            nonlocal refused, size
            message = await receive()
            size += len(message.get("body", b""))
            refused = size > MAX_BODY_BYTES
            return {"type": "http.disconnect"} if refused else message

        headers = dict(scope["headers"])
        allowed = self._key is None or scope["path"] in self._open or _bears(scope, self._key)
        if not (allowed and secrets.compare_digest(headers.get(PROXY_HEADER.encode(), b""), self._secret)):
            await _refuse(tagged, 401, "Unauthorized", "the API key is missing or wrong")
            return
        # HAProxy refuses a length that is not a number.
        refused = int(headers.get(b"content-length", b"0")) > MAX_BODY_BYTES
        if not refused:
            await self._app(scope, bounded, tagged)
        if refused and not begun:
            refused = False
            await _refuse(
                tagged, 413, "RequestTooLarge", f"a request of more than {MAX_BODY_BYTES:,} bytes is not allowed"
            )


def _bears(scope: Message, key: str) -> bool:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, given = value.decode("latin-1").partition(" ")
            return scheme.lower() == "bearer" and secrets.compare_digest(key_digest(given.strip()), key)
    return False


async def _refuse(send: Send, status: int, kind: str, message: str) -> None:
    headers = [(b"www-authenticate", b"Bearer")] if status == 401 else []
    await answer_json(send, status, {"error": {"message": message, "type": kind, "code": status}}, headers)


async def answer_json(
    send: Send, status: int, content: Mapping[str, Any], headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """Answer a request with a JSON body."""
    start = {"status": status, "headers": [(b"content-type", b"application/json"), *headers]}
    await send({"type": "http.response.start", **start})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
