"""The rollouts of a policy, a page at a time, and two iterations beside each other."""

from __future__ import annotations

import math
import re
import threading
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query as Parameter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from xray.studio.studio import Link, Pages, page, studio_of
from xray_runtime.data.ledger import Query, iterations
from xray_runtime.data.pictures import ENDINGS
from xray_runtime.data.published_pictures import PublishedPictures
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.artifacts import Dataset
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import find
from xray_runtime.kernel.store.manifest import LEDGER
from xray_runtime.trust.rollouts import Selection, checked_order, diff_iterations

router = APIRouter()
PAGES = Pages(router, (Link("/rollouts", "Rollouts", 20),))

PAGE_ROWS = 50
MAX_DIFFS = 50
MAX_SELECTIONS = 8
NUMBER = re.compile(r"[+-]?([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,4})?")
COUNT = re.compile(r"[0-9]{1,9}")
Number = Annotated[int, Parameter(ge=0, lt=10**9)]


_kept: OrderedDict[Any, Selection] = OrderedDict()
"""The last selections: their rows are selected once, and read a page at a time."""
_lock = threading.Lock()


def _number(text: str, field: str) -> float | None:
    """A number as people write it; None for an empty field."""
    text = text.strip()
    if not text:
        return None
    value = float(text) if NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{field}: {text[:80]!a} is not allowed: must be a number")
    return value


def _count(text: str, field: str) -> int | None:
    """A number of at least 0; None for an empty field."""
    text = text.strip()
    if text and not COUNT.fullmatch(text):
        raise ConfigError(f"{field}: {text[:80]!a} is not allowed: must be a number of at most 9 digits")
    return int(text) if text else None


def _selected(request: Request, ref: str) -> tuple[Node, Selection]:
    node, values = find(ref, studio_of(request).store()), request.query_params
    iteration = _count(values.get("iteration", ""), "iteration")
    query = Query(
        [iteration] if iteration is not None else [],
        values.get("source") or None,
        _number(values.get("min", ""), "lowest reward"),
        _number(values.get("max", ""), "highest reward"),
        "failed" in values,
        "unused" in values,
    )
    order = checked_order(values.get("order", "row"))
    # A ledger that was changed since is read again.
    ledger = sorted((node.directory / LEDGER).glob("*"))
    state = tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in ledger)
    key = (node.sha256, state, repr(query), order)
    with _lock:
        if key not in _kept:
            _kept[key] = Selection(node, query, order)
        _kept.move_to_end(key)
        if len(_kept) > MAX_SELECTIONS:
            _kept.popitem(last=False)
        return node, _kept[key]


@router.get("/rollouts")
def ledgers(request: Request) -> Response:
    """The checkpoints that have a ledger."""
    nodes = studio_of(request).store().graph.nodes.values()
    found = [(node, len(iterations(node.directory / LEDGER))) for node in nodes]
    return page(request, "ledgers.html", ledgers=[(node, number) for node, number in found if number])


@router.get("/pictures/{digest}")
def picture(request: Request, digest: str) -> Response:
    """A picture of a dataset's rows, as the dataset has it."""
    nodes = studio_of(request).store().graph.nodes.values()
    found = _pictures(tuple((node.directory, node.sha256) for node in nodes if node.is_a(Dataset))).read(digest)
    if found is None:
        raise HTTPException(404, "no dataset in the store has this picture")
    content, ending = found
    form = next(form for form, own in ENDINGS.items() if own == ending)
    return Response(content, media_type=f"image/{form.lower()}", headers={"Cache-Control": "private, max-age=3600"})


@lru_cache(maxsize=4)
def _pictures(checkpoints: tuple[tuple[Path, str], ...]) -> PublishedPictures:
    return PublishedPictures(checkpoints)


@router.get("/rollouts/{ref}")
def rollouts(request: Request, ref: str) -> Response:
    node, selection = _selected(request, ref)
    return page(
        request,
        "rollouts.html",
        node=node,
        values=request.query_params,
        kept=iterations(node.directory / LEDGER),
        sources=selection.sources,
        total=len(selection),
        changed=selection.changed,
        starts=range(0, len(selection), PAGE_ROWS),
        page_rows=PAGE_ROWS,
        search=request.url.query,
        part=selection.page(0, PAGE_ROWS).rows,
    )


@router.get("/rollouts/{ref}/rows")
def rows(request: Request, ref: str, start: Number) -> Response:
    """Rows from `start` on, which the browser asks for when they come into view."""
    _, selection = _selected(request, ref)
    return page(request, "rows_part.html", part=selection.page(start, PAGE_ROWS).rows, start=start)


@router.get("/rollouts/{ref}/diff")
def diff(request: Request, ref: str, first: Number, second: Number) -> Response:
    node = find(ref, studio_of(request).store())
    difference = diff_iterations(node, first, second, MAX_DIFFS)
    return page(request, "diff.html", node=node, difference=difference, kept=iterations(node.directory / LEDGER))
