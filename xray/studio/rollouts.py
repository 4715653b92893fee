"""The rollouts of a policy, a page at a time, and two iterations beside each other."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Annotated, Any

from fastapi import APIRouter, Query as Parameter, Request
from fastapi.responses import Response

from xray.studio.pages import page, studio_of
from xray_runtime.config.validation import ConfigError
from xray_runtime.data.ledger import Query, iterations
from xray_runtime.lineage.graph import Node
from xray_runtime.lineage.reference import find
from xray_runtime.lineage.rollouts import Selection, checked_order, diff_iterations
from xray_runtime.store.manifest import LEDGER

router = APIRouter()

PAGE_ROWS = 50
MAX_DIFFS = 50
MAX_SELECTIONS = 8


_kept: OrderedDict[Any, Selection] = OrderedDict()
"""The last selections: their rows are found once, and read a page at a time."""
_lock = threading.Lock()


def _number(text: str, field: str) -> float | None:
    try:
        return float(text) if text.strip() else None
    except ValueError:
        raise ConfigError(f"{field}: {text!r} is not allowed: must be a number") from None


def _selected(request: Request, ref: str) -> tuple[Node, Selection]:
    node, values = find(ref, studio_of(request).store()), request.query_params
    iteration = _number(values.get("iteration", ""), "iteration")
    query = Query(
        [int(iteration)] if iteration is not None else [],
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
def rows(request: Request, ref: str, start: Annotated[int, Parameter(ge=0)]) -> Response:
    """Rows from `start` on, which the browser asks for when they come into view."""
    _, selection = _selected(request, ref)
    return page(request, "rows_part.html", part=selection.page(start, PAGE_ROWS).rows, start=start)


@router.get("/rollouts/{ref}/diff")
def diff(
    request: Request, ref: str, first: Annotated[int, Parameter(ge=0)], second: Annotated[int, Parameter(ge=0)]
) -> Response:
    node = find(ref, studio_of(request).store())
    found = diff_iterations(node, first, second, MAX_DIFFS)
    return page(request, "diff.html", node=node, found=found, kept=iterations(node.directory / LEDGER))
