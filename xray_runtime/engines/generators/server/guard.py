"""Asks every request to a server for its key: vLLM's own key does not guard the calls that replace weights."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse

from xray_runtime.engines.generators.server.launch import KEY

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class KeyGuard:
    """ASGI middleware; without a key in the environment everybody on this machine may call."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._key = app, os.environ.get(KEY, "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._key:
            given = Headers(scope=scope).get("Authorization", "")
            if not secrets.compare_digest(given.encode(), f"Bearer {self._key}".encode()):
                await PlainTextResponse(f"the key in {KEY} is needed", 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)
