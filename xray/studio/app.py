"""The studio's server: its pages, on one port."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException as AnyHTTPException

from xray.studio.access import Access, Fields
from xray_runtime.config.validation import ConfigError
from xray_runtime.lineage.audit.checkpoints import Audit, audit
from xray_runtime.lineage.gates import NotPromoted
from xray_runtime.lineage.log import view
from xray_runtime.lineage.reference import LineageStore, open_lineage_store
from xray_runtime.store.checkpoints import CHECKPOINTS

STATIC = Path(__file__).with_name("static")


@dataclass
class Studio:
    """The output directory that the pages show."""

    output: Path
    by: str
    """Name of the person, unless they give another one."""
    tracking_uri: str | None = None
    public: Path | None = None
    serve: str | None = None
    """Address of a model that `xray serve` serves, such as http://127.0.0.1:8000."""
    serve_key: str = field(default="", repr=False)
    feedback_key: str = field(default="", repr=False)
    audited: Audit | None = None
    """The last audit of everything."""
    _read: tuple[int, LineageStore] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def store(self) -> LineageStore:
        """The output directory, read again where a checkpoint came or went."""
        with self._lock:
            changed = (self.output / CHECKPOINTS).stat().st_mtime_ns
            if self._read is None or self._read[0] != changed:
                self._read = changed, open_lineage_store(self.output, self.tracking_uri)
            return self._read[1]

    def audit(self, hashing: bool) -> None:
        """Audit everything: what `xray audit --all` does."""
        self.audited = audit(open_lineage_store(self.output, self.tracking_uri), public=self.public, hashing=hashing)

    def audit_text(self) -> tuple[str, str]:
        """(state, text): `unknown`, `sound` or `broken`, and that in words."""
        if self.audited is None:
            return "unknown", "not audited since the studio started"
        stale = "" if self.audited.log == view(self.output).head else "; something was published or decided since"
        state = "sound" if self.audited.is_sound else "broken"
        return state, f"{'sound' if state == 'sound' else 'NOT SOUND'}: {self.audited.checkpoints} checkpoints{stale}"

    def broken(self, name: str) -> list[str]:
        """The findings of the last audit about a checkpoint (`Node.name`)."""
        found = self.audited.findings if self.audited is not None else []
        return [f"{f.code}: {f.detail}" for f in found if f.is_broken and f.subject == name]

    @cached_property
    def pages(self) -> Environment:
        environment = Environment(
            loader=PackageLoader("xray.studio"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
        )
        environment.filters["number"] = _number
        return environment


def _number(value: float | str | None) -> str:
    return "–" if value is None or value != value else value if isinstance(value, str) else f"{value:+.3f}"


def studio_of(request: Request) -> Studio:
    """The studio of a request, for handlers."""
    studio: Studio = request.app.state.studio
    return studio


def page(request: Request, template: str, status: int = 200, /, **values: Any) -> HTMLResponse:
    """A page from its template; all values are escaped."""
    studio = studio_of(request)
    shared = {"csrf": request.state.csrf, "serve": studio.serve, "path": request.url.path, "audit": studio.audit_text()}
    return HTMLResponse(studio.pages.get_template(template).render(**shared | values), status)


def make_app(studio: Studio, access: Access) -> FastAPI:
    """The application; uvicorn serves it."""
    from xray.studio import models, review, rollouts, runs

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.state.studio = studio
    app.middleware("http")(access)
    app.mount("/static", StaticFiles(directory=STATIC))
    for module in (runs, rollouts, review, models):
        app.include_router(module.router)

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
        elif isinstance(error, HTTPException | AnyHTTPException):
            lines, status = [str(error.detail)], error.status_code
        elif isinstance(error, RequestValidationError):
            lines, status = [f"{e['loc'][-1]}: {e['input']!r} is not allowed ({e['msg']})" for e in error.errors()], 400
        else:
            lines, status = [str(error)], 400
        name = "error_part.html" if "hx-request" in request.headers else "error.html"
        return page(request, name, status, lines=lines)

    for kind in (ConfigError, NotPromoted, AnyHTTPException, RequestValidationError):
        app.add_exception_handler(kind, refused)
    return app
