"""What every answer of a served model goes through: the key is checked, the answer says which model it comes from."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

SHA256_HEADER = "x-xray-model-sha256"
PROXY_HEADER = "x-xray-front"
OPEN_PATHS = ("/health",)
"""Load balancers ask them, and have no key."""


def key_digest(key: str) -> str:
    """What a replica is given instead of the key."""
    return hashlib.sha256(key.encode()).hexdigest()


class Tagged:
    """ASGI middleware. vLLM's own check of a key leaves every path open that does not begin with /v1.

    Args:
        sha256: the model's; sent with every answer, errors too.
        key: `key_digest` of the key that requests must carry (`Authorization: Bearer KEY`); None lets everybody in.
        secret: what the front sends along (`PROXY_HEADER`): nobody else is answered, on whatever port this listens.
    """

    def __init__(self, app: App, sha256: str, key: str | None, secret: str) -> None:
        self._app, self._sha256, self._key, self._secret = app, sha256, key, secret.encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            # No text model answers there.
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                tag = (SHA256_HEADER.encode(), self._sha256.encode())
                message = {**message, "headers": [*message.get("headers", []), tag]}
            await send(message)

        given = dict(scope["headers"]).get(PROXY_HEADER.encode(), b"")
        allowed = self._key is None or scope["path"] in OPEN_PATHS or _bears(scope, self._key)
        if allowed and secrets.compare_digest(given, self._secret):
            await self._app(scope, receive, tagged)
        else:
            await _refuse(tagged)


def _bears(scope: Message, key: str) -> bool:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, given = value.decode("latin-1").partition(" ")
            return scheme.lower() == "bearer" and secrets.compare_digest(key_digest(given.strip()), key)
    return False


async def _refuse(send: Send) -> None:
    error = {"message": "the API key is missing or not the right one", "type": "Unauthorized", "code": 401}
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})
