"""Refuses requests with JSON that breaks the engine's server: nested too deeply, or with an unpaired surrogate."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp as App, Message, Receive, Scope, Send

from xray_runtime.kernel.request_bodies import parse_body
from xray_runtime.live.serving.middleware import answer_json


class JsonBodies:
    """ASGI middleware, behind `Tagged`, which limits the size of bodies. It reads them in threads, so that others are
    answered meanwhile."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _says_json(scope):
            await self._app(scope, receive, send)
            return
        body = bytearray()
        while True:
            last = await receive()
            body += last.get("body", b"")
            if last["type"] != "http.request" or not last.get("more_body"):
                break
        if last["type"] == "http.request" and body:
            try:
                await asyncio.to_thread(parse_body, bytes(body))
            except ValueError as error:
                content = {"message": str(error), "type": "BadRequestError", "code": 400}
                await answer_json(send, 400, {"error": content})
                return
        is_whole = last["type"] == "http.request"
        # A client that left, or whose request is too large, is told so by the message after its body.
        whole: Message = {"type": "http.request", "body": bytes(body), "more_body": not is_whole}
        read = [whole] if is_whole else [whole, last]

        async def replayed() -> Message:
            return read.pop(0) if read else await receive()

        await self._app(scope, replayed, send)


def _says_json(scope: Scope) -> bool:
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    return scope.get("method") == "POST" and all(b"json" in kind.lower() for kind in kinds)
