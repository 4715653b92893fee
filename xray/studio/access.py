"""Access to the studio: sessions, the login where it is open to others, and the headers of every answer.

On loopback a session begins without a login, and the name in the address bar must be loopback's: a page elsewhere that
has its own name resolve to this machine is refused. A POST must carry its session's token, which such a page does not
have.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import Depends, HTTPException, Request
from fastapi.responses import PlainTextResponse, RedirectResponse, Response

COOKIE = "xray_studio"
SESSION_S = 12 * 3600
MAX_FORM_BYTES = 512 * 2**10
OPEN_PATHS = ("/login", "/static/")
METRICS_PATH = "/metrics"
"""Prometheus sends the token of the login as a bearer token: it keeps no session."""
LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
"""The headers `Host` that are answered without a login."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def _one_line(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"this page cannot be shown ({type(error).__name__})", 422)


@dataclass(frozen=True)
class Access:
    """Checks every request.

    Args:
        token: of the login; None: the studio listens on loopback, and there is none.
    """

    token: str | None
    damaged: Callable[[Request, Exception], Response] = _one_line
    """The answer if a page cannot be made: a file that it shows may be damaged or forged."""
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def is_token(self, given: str) -> bool:
        """Whether `given` is the token of the login."""
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def begin(self, response: Response, *, secure: bool) -> str:
        """Begin a session; returns its cookie."""
        content = f"{secrets.token_urlsafe(24)}.{int(time.time()) + SESSION_S}"
        cookie = f"{content}.{self._mac('session', content)}"
        response.set_cookie(COOKIE, cookie, SESSION_S, httponly=True, samesite="strict", secure=secure)
        return cookie

    def is_session(self, cookie: str) -> bool:
        """Whether a cookie is of a session that has not ended."""
        content, _, mac = cookie.rpartition(".")
        if not hmac.compare_digest(mac.encode(), self._mac("session", content).encode()):
            return False
        return int(content.rpartition(".")[2]) > time.time()

    def csrf(self, cookie: str) -> str:
        """The token that POSTs of a session carry."""
        return self._mac("csrf", cookie)

    def _mac(self, purpose: str, text: str) -> str:
        return hmac.new(self._secret, f"{purpose}:{text}".encode(), hashlib.sha256).hexdigest()

    async def __call__(self, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        """Middleware: a request without a session gets one, or is sent to the login."""
        response = await self._answer(request, call_next)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    async def _answer(self, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        host = request.headers.get("host", "")
        if self.token is None and not LOOPBACK.fullmatch(host):
            return PlainTextResponse(f"host {host[:80]!a} is not allowed: use http://127.0.0.1", 421)
        cookie, new = request.cookies.get(COOKIE, ""), Response()
        if not self.is_session(cookie):
            is_open = request.url.path.startswith(OPEN_PATHS) or self._is_scrape(request)
            if self.token is not None and not is_open:
                return _to_login(request)
            cookie = "" if self.token is not None else self.begin(new, secure=False)
        request.state.csrf = self.csrf(cookie) if cookie else ""
        try:
            response = await call_next(request)
        except Exception as error:
            response = self.damaged(request, error)
        for name, value in new.raw_headers:
            if name == b"set-cookie":
                response.raw_headers.append((name, value))
        return response

    def _is_scrape(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_metrics = request.method == "GET" and request.url.path == METRICS_PATH
        return is_metrics and scheme.lower() == "bearer" and self.is_token(given.strip())


def _to_login(request: Request) -> Response:
    if "hx-request" in request.headers:
        return Response(status_code=401, headers={"HX-Redirect": "/login"})
    return RedirectResponse("/login", 303) if request.method == "GET" else PlainTextResponse("log in first", 401)


async def form(request: Request) -> dict[str, str]:
    """The fields of a POST. Raises HTTPException where it is too large, or lacks its session's token."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_FORM_BYTES:
            raise HTTPException(413, f"a form of more than {MAX_FORM_BYTES:,} bytes is not allowed")
    fields = dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))
    expected, given = request.state.csrf, request.headers.get("x-csrf-token") or fields.pop("csrf", "")
    if request.url.path != "/login" and not (expected and hmac.compare_digest(given.encode(), expected.encode())):
        raise HTTPException(403, "the form is of another session: load the page again")
    return fields


Fields = Annotated[dict[str, str], Depends(form)]
"""The fields of a POST, whose session was checked."""
