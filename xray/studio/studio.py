"""Shared by all pages of the studio: how they plug in, the output directory that they show, and templates."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from xray_runtime.data.published_pictures import as_html
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.history.reference import LineageStore, open_lineage_store
from xray_runtime.kernel.plugs import Registry
from xray_runtime.kernel.report.rendering import TEMPLATES, template
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS
from xray_runtime.trust.audit.checkpoints import Audit, audit

log = logging.getLogger(__name__)

DAMAGED = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)
"""Errors while reading a file with unexpected content."""


@dataclass(frozen=True)
class Link:
    """An entry of the navigation."""

    address: str
    title: str
    order: int
    """Its position: X-ray's own are at 10, 20, …"""
    is_shown: Callable[[Studio], bool] = lambda studio: True


@dataclass(frozen=True)
class Pages:
    """Pages that plug into the studio."""

    router: APIRouter
    links: tuple[Link, ...] = ()
    templates: str = "xray.studio"
    """The package whose folder `templates` they use."""


PAGES = Registry[Pages]("page", "xray.studio.pages", "PAGES", "xray.pages")


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
    audited_at: float = 0.0
    """When it ended, in seconds since 1970."""
    _read: tuple[int, LineageStore] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def store(self) -> LineageStore:
        """The output directory, read again after a checkpoint was added or removed."""
        with self._lock:
            changed = (self.output / CHECKPOINTS).stat().st_mtime_ns
            if self._read is None or self._read[0] != changed:
                self._read = changed, open_lineage_store(self.output, self.tracking_uri)
            return self._read[1]

    def audit(self, hashing: bool) -> None:
        """Audit everything: what `xray audit --all` does."""
        self.audited = audit(open_lineage_store(self.output, self.tracking_uri), public=self.public, hashing=hashing)
        self.audited_at = time.time()

    def audit_every(self, seconds: float) -> None:
        """Audit now and then periodically; for a thread. A failed audit is repeated at the next turn."""
        while True:
            try:
                self.audit(hashing=True)
            except Exception:
                log.exception("the audit failed; it is tried again in %.0f minutes", seconds / 60)
            time.sleep(seconds)

    def audit_text(self) -> tuple[str, str]:
        """(state, description): `unknown`, `sound` or `broken`, and a line of text."""
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
    def pages(self) -> list[Pages]:
        """All plugs."""
        return [PAGES.get(name) for name in PAGES]

    @cached_property
    def links(self) -> list[Link]:
        """The navigation."""
        links = [link for pages in self.pages for link in pages.links if link.is_shown(self)]
        return sorted(links, key=lambda link: link.order)

    @cached_property
    def templates(self) -> tuple[Path, ...]:
        """Folders with templates: ours, those of pages from other packages, then those that the report has."""
        packages = dict.fromkeys(["xray.studio", *(pages.templates for pages in self.pages)])
        return (*(Path(str(files(package))) / "templates" for package in packages), TEMPLATES)


def studio_of(request: Request) -> Studio:
    """The studio of a request, for handlers."""
    studio: Studio = request.app.state.studio
    return studio


def page(request: Request, name: str, status: int = 200, /, **values: Any) -> HTMLResponse:
    """A page from its template; all values are escaped."""
    studio = studio_of(request)
    shared = {"csrf": request.state.csrf, "links": studio.links, "path": request.url.path, "audit": studio.audit_text()}
    shared["pictured"] = partial(as_html, address="/pictures/{}".format)
    text = template(name, studio.templates).render(**shared | values)
    # A file's name may have bytes that are no text.
    return HTMLResponse(text.encode("utf-8", "backslashreplace"), status)
