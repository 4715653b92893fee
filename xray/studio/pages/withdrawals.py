"""Withdrawals: those in the log, whether they still hold, and a form for another; as `xray withdraw`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from xray.studio.access import Fields
from xray.studio.studio import Link, Pages, page, studio_of
from xray.tasks.output_directory import file_lock, require_no_run
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.kinds.withdrawn import Withdrawals
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.history.reference import LineageStore, open_lineage_store
from xray_runtime.kernel.store.identity import digest
from xray_runtime.live import withdrawal

router = APIRouter()
PAGES = Pages(router, (Link("/withdrawals", "Withdrawals", 70),))

KINDS = {"user": withdrawal.plan_user, "source": withdrawal.plan_source}
LOCK = "withdraw.lock"


@router.get("/withdrawals")
def withdrawals(request: Request) -> Response:
    """All withdrawals, newest first, and the form for another."""
    studio = studio_of(request)
    entries = list(reversed(view(studio.output).state(Withdrawals)))
    return page(request, "withdrawals.html", entries=entries, nodes=studio.store().graph.nodes, left=[])


@router.get("/withdrawals/verify")
def verify(request: Request) -> Response:
    """The result of `xray withdraw --verify`. It reads every recorded answer, so the page does not wait for it."""
    studio = studio_of(request)
    contradictions = withdrawal.verify(open_lineage_store(studio.output, studio.tracking_uri))
    return page(request, "verify_part.html", contradictions=contradictions)


@router.post("/withdrawals")
def withdraw(request: Request, fields: Fields) -> Response:
    """List what a withdrawal would do; after the person has seen that list, do it."""
    studio, kind, name = studio_of(request), fields.get("kind", ""), fields.get("name", "").strip()
    if kind not in KINDS:
        raise ConfigError(f"kind: {kind!r} is not allowed: must be one of {', '.join(KINDS)}")
    if not name:
        raise ConfigError("name: is required: the person, or the source")
    store = open_lineage_store(studio.output, studio.tracking_uri)
    with file_lock(studio.output / "locks", LOCK):
        plan = KINDS[kind](store, name)
        seen = _seen(store, plan)
        if fields.get("answer") != "withdraw":
            shown: dict[str, Any] = {"kind": kind, "name": name, "plan": plan, "seen": seen, "by": studio.by}
            return page(request, "withdraw.html", **shown)
        by = fields.get("by", "").strip()
        if not by:
            raise ConfigError("by: is required: it is recorded with the withdrawal")
        if fields.get("seen") != seen:
            raise ConfigError("seen: what descends from it has changed since the list was shown: list it again")
        require_no_run(studio.output)
        left = withdrawal.withdraw(store, plan, by)
    if not left:
        return RedirectResponse("/withdrawals", 303)
    entries = list(reversed(view(studio.output).state(Withdrawals)))
    return page(request, "withdrawals.html", 500, entries=entries, nodes=store.graph.nodes, left=left)


def _seen(store: LineageStore, plan: withdrawal.Withdrawal) -> str:
    """A digest that changes with the list that a person decides on."""
    files = [path.relative_to(store.output).as_posix() for path in plan.files]
    return digest([plan.subject, [n.sha256 for n in plan.holders], [n.sha256 for n in plan.descendants], files])
