"""Reads JSON bodies before the engine's server does: refuses what breaks it (nested too deeply, an unpaired surrogate)
and names of models that are not served, and notes which checkpoint will answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.types import ASGIApp as App, Message, Receive, Scope, Send

from xray_runtime.kernel.request_bodies import parse_body
from xray_runtime.live.serving.middleware import ANSWERED_BY, answer_json


class JsonBodies:
    """ASGI middleware, behind `Tagged`, which limits the size of bodies. It reads them in threads, so that others are
    answered meanwhile.

    Args:
        sha256s: name of a model in requests → sha256 of its checkpoint, noted as `ANSWERED_BY` of the scope.
    """

    def __init__(self, app: App, sha256s: Mapping[str, str]) -> None:
        self._app, self._sha256s = app, sha256s

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
                content = await asyncio.to_thread(parse_body, bytes(body))
            except ValueError as error:
                await _refuse(send, 400, "BadRequestError", str(error))
                return
            if isinstance(content, dict) and isinstance(name := content.get("model"), str) and name:
                if name not in self._sha256s:
                    allowed = ", ".join(map(repr, self._sha256s))
                    await _refuse(
                        send, 404, "NotFoundError", f"model: {name!r} is not allowed: must be one of {allowed}"
                    )
                    return
                scope[ANSWERED_BY] = self._sha256s[name]
        is_whole = last["type"] == "http.request"
        # A client that left, or whose request is too large, is told so by the message after its body.
        whole: Message = {"type": "http.request", "body": bytes(body), "more_body": not is_whole}
        read = [whole] if is_whole else [whole, last]

        async def replayed() -> Message:
            return read.pop(0) if read else await receive()

        await self._app(scope, replayed, send)


async def _refuse(send: Send, status: int, kind: str, message: str) -> None:
    await answer_json(send, status, {"error": {"message": message, "type": kind, "code": status}})


def _says_json(scope: Scope) -> bool:
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    return scope.get("method") == "POST" and all(b"json" in kind.lower() for kind in kinds)
