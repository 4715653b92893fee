"""The rollouts of a policy, a page at a time, and two iterations beside each other."""

from __future__ import annotations

import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlencode

from fastapi import APIRouter, Query as Parameter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from xray.studio.studio import Link, Pages, page, studio_of
from xray_runtime.data.ledger import Query, iterations
from xray_runtime.data.pictures import ENDINGS
from xray_runtime.data.published_pictures import PublishedPictures
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.artifacts import Dataset, Preferences
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import find
from xray_runtime.kernel.store.manifest import LEDGER
from xray_runtime.trust.rollout_tokens import (
    MEASURES,
    checked_measure,
    extreme_tokens,
    reply_tokens,
    reward_spread,
)
from xray_runtime.trust.rollouts import Selection, checked_order, diff_iterations, same_prompts

router = APIRouter()
PAGES = Pages(router, (Link("/rollouts", "Rollouts", 20),))

T = TypeVar("T")
PAGE_ROWS = 50
MAX_DIFFS = 50
MAX_SELECTIONS = 16
MAX_SEARCH, MAX_RANGE, MAX_EXTREMES = 200, 10_000, 60
NUM_BINS, MAX_COLUMNS = 24, 48
"""Bins and columns of the picture of all rewards."""
RANGE = re.compile(r"([0-9]{1,6})-([0-9]{1,6})")
NUMBER = re.compile(r"[+-]?([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,4})?")
COUNT = re.compile(r"[0-9]{1,9}")
Number = Annotated[int, Parameter(ge=0, lt=10**9)]


_kept: OrderedDict[Any, Any] = OrderedDict()
"""The last selections and pictures: their rows are selected once, and read a page at a time."""
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


def _iterations(text: str) -> list[int]:
    """The iterations of a field: `7`, or `7-9`; none for an empty field."""
    if (found := RANGE.fullmatch(text.strip())) is None:
        number = _count(text, "iteration")
        return [number] if number is not None else []
    first, last = int(found[1]), int(found[2])
    if not first <= last < first + MAX_RANGE:
        raise ConfigError(f"iteration: {text[:80]!a} is not allowed: must be a range of at most {MAX_RANGE}")
    return list(range(first, last + 1))


def _selected(request: Request, ref: str) -> tuple[Node, Selection]:
    node, values = find(ref, studio_of(request).store()), request.query_params
    text = values.get("text", "").strip()[:MAX_SEARCH]
    query = Query(
        _iterations(values.get("iteration", "")),
        values.get("source") or None,
        _number(values.get("min", ""), "lowest reward"),
        _number(values.get("max", ""), "highest reward"),
        "failed" in values,
        "unused" in values,
    )
    order = checked_order(values.get("order", "row"))
    return node, _keep(node, (repr(query), order, text), lambda: Selection(node, query, order, text))


def _keep(node: Node, of: tuple[str, ...], make: Callable[[], T]) -> T:
    """The value of `make()`, kept until the ledger changes."""
    ledger = sorted((node.directory / LEDGER).glob("*"))
    state = tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in ledger)
    key = (node.sha256, state, of)
    with _lock:
        if key not in _kept:
            _kept[key] = make()
        _kept.move_to_end(key)
        if len(_kept) > MAX_SELECTIONS:
            _kept.popitem(last=False)
        found: T = _kept[key]
        return found


@router.get("/rollouts")
def ledgers(request: Request) -> Response:
    """The checkpoints that have a ledger."""
    found = [(node, len(iterations(node.directory / LEDGER))) for node in _with_ledgers(request)]
    return page(request, "ledgers.html", ledgers=found)


def _with_ledgers(request: Request) -> list[Node]:
    nodes = studio_of(request).store().graph.nodes.values()
    return [node for node in nodes if iterations(node.directory / LEDGER)]


@router.get("/pictures/{digest}")
def picture(request: Request, digest: str) -> Response:
    """A picture of a dataset's rows, as the dataset has it."""
    nodes = studio_of(request).store().graph.nodes.values()
    data = tuple((node.directory, node.sha256) for node in nodes if node.is_a(Dataset) or node.is_a(Preferences))
    found = _pictures(data).read(digest)
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
        others=[n for n in _with_ledgers(request) if n.sha256 != node.sha256 and same_prompts(n, node)],
        sources=selection.sources,
        total=len(selection),
        changed=selection.changed,
        starts=range(0, len(selection), PAGE_ROWS),
        page_rows=PAGE_ROWS,
        search=request.url.query,
        part=selection.page(0, PAGE_ROWS).rows,
        spread=_spread(node, request),
    )


def _spread(node: Node, request: Request) -> dict[str, Any] | None:
    """The picture of all rewards: cells (x, y, share of the fullest, count, address), and the means as a line."""
    source = request.query_params.get("source") or None
    found = _keep(node, ("spread", source or ""), lambda: reward_spread(node, source, NUM_BINS, MAX_COLUMNS))
    if found is None:
        return None
    fullest, span = max(map(max, found.counts)), found.edges[-1] - found.edges[0]
    cells = []
    for x, ((first, last), counts) in enumerate(zip(found.columns, found.counts, strict=True)):
        for y, count in enumerate(counts):
            fields = {"iteration": f"{first}-{last}" if last > first else str(first), "source": source or ""}
            # Bounds are rounded outwards, so that no reply of the bin is left out.
            bounds = {"min": f"{found.edges[y] - 1e-6:.6f}", "max": f"{found.edges[y + 1] + 1e-6:.6f}"}
            if count:
                cells.append((x, NUM_BINS - 1 - y, round(0.15 + 0.85 * count / fullest, 2), count, fields | bounds))
    line = [
        f"{x + 0.5},{NUM_BINS * (1 - (mean - found.edges[0]) / span):.2f}"
        for x, mean in enumerate(found.means)
        if mean == mean
    ]
    return {
        "cells": [(*cell[:4], urlencode({k: v for k, v in cell[4].items() if v}), cell[4]) for cell in cells],
        "line": " ".join(line),
        "width": len(found.columns),
        "height": NUM_BINS,
        "low": found.edges[0],
        "high": found.edges[-1],
        "first": found.columns[0][0],
        "last": found.columns[-1][1],
    }


@router.get("/rollouts/{ref}/tokens")
def tokens(request: Request, ref: str, iteration: Number, row: Number, round: Number = 0, by: str = "kl") -> Response:
    """A reply token by token, shaded by one of `MEASURES`."""
    node = find(ref, studio_of(request).store())
    reply = reply_tokens(node, iteration, row, round, checked_measure(by))
    return page(request, "tokens.html", node=node, reply=reply, by=by, measures=MEASURES)


@router.get("/rollouts/{ref}/extremes")
def extremes(request: Request, ref: str, iteration: Number, by: str = "kl") -> Response:
    """The tokens of an iteration that stand out most."""
    node = find(ref, studio_of(request).store())
    found = extreme_tokens(node, iteration, checked_measure(by), MAX_EXTREMES)
    values: dict[str, Any] = {"iteration": iteration, "by": by, "measures": MEASURES, "found": found}
    return page(request, "extremes.html", node=node, kept=iterations(node.directory / LEDGER), **values)


@router.get("/rollouts/{ref}/rows")
def rows(request: Request, ref: str, start: Number) -> Response:
    """Rows from `start` on, which the browser asks for when they come into view."""
    node, selection = _selected(request, ref)
    return page(request, "rows_part.html", node=node, part=selection.page(start, PAGE_ROWS).rows)


@router.get("/rollouts/{ref}/diff")
def diff(request: Request, ref: str, first: Number, second: Number) -> Response:
    """Two iterations beside each other; `with` in the address: the second is of that policy."""
    store, with_ref = studio_of(request).store(), request.query_params.get("with")
    node = find(ref, store)
    other = find(with_ref, store) if with_ref else node
    difference = diff_iterations(node, first, second, MAX_DIFFS, other)
    return page(request, "diff.html", node=node, other=other, difference=difference)
