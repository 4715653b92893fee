"""The studio's server: its pages, on one port."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from xray.studio.access import Access, Fields
from xray.studio.studio import Studio, page
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.report.rendering import TEMPLATES
from xray_runtime.trust.gates import NotPromoted

log = logging.getLogger(__name__)

STATIC = Path(__file__).with_name("static")


def make_app(studio: Studio, access: Access) -> FastAPI:
    """The application; uvicorn serves it."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.state.studio = studio

    def damaged(request: Request, error: Exception) -> Response:
        """Files that the pages read may be damaged: the answer is one line, never a traceback."""
        log.error("%s %s", request.method, request.url.path, exc_info=error)
        reason = ascii(first_line(error))[1:-1][:200]
        line = f"this page cannot be shown ({type(error).__name__}: {reason}): `xray audit` names damaged files"
        try:
            return page(request, "error.html", 422, lines=[line])
        except Exception:
            return PlainTextResponse(line, 422)

    app.middleware("http")(replace(access, damaged=damaged))

    @app.get("/static/common.css")
    def common_style() -> Response:
        return FileResponse(TEMPLATES / "common.css")

    app.mount("/static", StaticFiles(directory=STATIC))
    for pages in studio.pages:
        app.include_router(pages.router)

    @app.get("/login")
    def login_page(request: Request) -> Response:
        return page(request, "login.html", wrong=False) if access.token is not None else RedirectResponse("/", 303)

    @app.post("/login")
    def login(request: Request, fields: Fields) -> Response:
        if not access.is_token(fields.get("token", "").strip()):
            return page(request, "login.html", 401, wrong=True)
        response = RedirectResponse("/", 303)
        access.begin(response, secure=request.url.scheme == "https")
        return response

    def refused(request: Request, error: Exception) -> Response:
        """Bad input and refusals are a page with one line."""
        if isinstance(error, NotPromoted):
            lines, status = error.reasons, 409
        elif isinstance(error, HTTPException):
            lines, status = [str(error.detail)], error.status_code
        elif isinstance(error, RequestValidationError):
            lines, status = (
                [f"{e['loc'][-1]}: {str(e['input'])[:80]!a} is not allowed ({e['msg']})" for e in error.errors()],
                400,
            )
        else:
            lines, status = [str(error)], 400
        name = "error_part.html" if "hx-request" in request.headers else "error.html"
        return page(request, name, status, lines=lines)

    for kind in (ConfigError, NotPromoted, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, refused)
    return app
