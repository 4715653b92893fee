"""Models: their lineage with the state of the audit, evaluations side by side, and promotion."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from xray.studio.access import Fields
from xray.studio.studio import DAMAGED, Link, Pages, Studio, page, studio_of
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.kinds.canary import Canaries
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.graph.artifacts import Comparison, Evaluation
from xray_runtime.kernel.history.graph import CheckpointGraph, Node
from xray_runtime.kernel.history.reference import CANDIDATE, LineageStore, find, open_lineage_store, resolve
from xray_runtime.kernel.history.render import entry, stage_name
from xray_runtime.kernel.report.evaluations import (
    DrawnResult,
    EvaluationResults,
    SideBySide,
    measured,
    measures,
    side_by_side,
)
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.store.identity import digest
from xray_runtime.kernel.tracking.mlflow_tracker import flatten
from xray_runtime.live.canary import canary_of, summary
from xray_runtime.trust import promotion
from xray_runtime.trust.diff import CAUSES, changed, diff
from xray_runtime.trust.gates import NotPromoted
from xray_runtime.trust.page import drawing

MAX_LOST = 6
"""Pairs of each evaluation that its candidate lost."""
MAX_CHANGES, MAX_CHANGE = 30, 200
"""Differences of candidate and champion, and characters of each."""

router = APIRouter()
PAGES = Pages(
    router, (Link("/lineage", "Lineage", 40), Link("/evaluations", "Evaluations", 50), Link("/promote", "Promote", 60))
)


@router.get("/lineage")
def lineage(request: Request) -> Response:
    """Every checkpoint, each with the state of the last audit."""
    studio = studio_of(request)
    graph, log = studio.store().graph, view(studio.output)
    # In the order in which they were published; what came from elsewhere is last.
    numbers = {entry.checkpoint: number for number, entry in enumerate(log.published.values())}
    starts = sorted(graph.nodes, key=lambda sha: (numbers.get(sha, len(numbers)), sha))
    order = [sha for sha in graph.ancestors(starts) if sha in graph.nodes]
    aliases: dict[str, list[str]] = {}
    for (name, alias), decision in log.decided.items():
        aliases.setdefault(decision.checkpoint, []).append(f"{name}@{alias}")
    listed = [
        {"node": graph.nodes[sha], "state": _state(studio, graph.nodes[sha]), "aliases": aliases.get(sha, [])}
        for sha in order
    ]
    picture = drawing(graph, order)
    for box, one in zip(picture["nodes"], listed, strict=True):
        state = one["state"]
        box["state"] = f"{state} champion" if one["aliases"] else state
        box["below"] = box["sha"] if state == "unknown" else f"{box['sha'][:8]} {state}"
    return page(request, "lineage.html", graph=picture, listed=listed)


def _state(studio: Studio, node: Node) -> str:
    """`unknown`, `sound` or `broken`: of one checkpoint, by the last audit."""
    return "unknown" if studio.audited is None else "broken" if studio.broken(node.name) else "sound"


@router.get("/checkpoints/{ref}")
def checkpoint(request: Request, ref: str) -> Response:
    studio = studio_of(request)
    store = studio.store()
    node = find(ref, store)
    graph = store.graph
    statement = node.statement
    return page(
        request,
        "checkpoint.html",
        node=node,
        state=_state(studio, node),
        broken=studio.broken(node.name),
        facts=entry(graph, node.sha256),
        made_from=[(role, sha, stage_name(graph, sha)) for role, sha in graph.parents(node.sha256)],
        used_by=[(role, sha, stage_name(graph, sha)) for role, sha in graph.children.get(node.sha256, [])],
        found=measures(_evaluations(store, [node] if _is_evaluated(node) else [])),
        differences=_differences(graph, node),
        statement=statement and statement.model_dump_json(indent=2, by_alias=True),
        config=flatten(node.manifest.config),
        results=flatten(node.results),
    )


def _differences(graph: CheckpointGraph, node: Node) -> tuple[Node, dict[str, list[Any]]] | None:
    """The parent that the same kind of stage made, as the PPO stage before, and field → [its value, this one's]."""
    parents = (graph.nodes.get(sha) for _, sha in graph.parents(node.sha256))
    before = next((p for p in parents if p is not None and p.manifest.kind == node.manifest.kind), None)
    if before is None:
        return None
    return before, changed(flatten(before.manifest.config), flatten(node.manifest.config))


def _is_evaluated(node: Node) -> bool:
    return node.kind is not None and bool(node.kind.sides and node.kind.results)


def _evaluated(store: LineageStore) -> list[Node]:
    """The evaluations and benchmarks, in the order of the graph."""
    nodes = (store.graph.nodes.get(sha) for sha in store.graph.ancestors(sorted(store.graph.nodes)))
    return [n for n in nodes if n is not None and _is_evaluated(n)]


def _evaluations(store: LineageStore, nodes: list[Node]) -> SideBySide:
    evaluations: list[EvaluationResults] = []
    for node in nodes:
        assert node.kind is not None
        try:
            evaluations.append(measured(node.kind, node.directory))
        # The audit names it.
        except DAMAGED:
            continue
    return side_by_side(evaluations, {sha: node.name for sha, node in store.graph.nodes.items()})


@router.get("/evaluations")
def evaluations(request: Request) -> Response:
    store = studio_of(request).store()
    nodes = _evaluated(store)
    found, lost = measures(_evaluations(store, nodes)), [one for node in nodes for one in _lost(node)]
    return page(request, "evaluations.html", found=found, lost=lost)


def _lost(node: Node) -> list[dict[str, Any]]:
    """Pairs of an evaluation or a comparison in which its policy lost, the largest loss first."""
    found: list[dict[str, Any]] = []
    try:
        judge = node.results["judge"]
        for pair in json.loads(read_bounded(node.directory / "lost.json"))[:MAX_LOST]:
            before, after = ("champion", "candidate") if "candidate" in pair else ("before", "after")
            by = judge if f"{judge}_{before}" in pair else "reward"
            scores = {"before_score": float(pair[f"{by}_{before}"]), "after_score": float(pair[f"{by}_{after}"])}
            texts = {"prompt": str(pair["prompt"]), "before": str(pair[before]), "after": str(pair[after])}
            found.append({"stage": node.manifest.stage, "against": before, "judge": str(by), **scores, **texts})
    # The audit names it; benchmarks have none.
    except DAMAGED:
        return []
    return found


@router.get("/promote")
def models(request: Request) -> Response:
    """The registered models, and who decided what about them."""
    studio = studio_of(request)
    log = view(studio.output)
    names = sorted({name for name, _ in log.decided if name})
    aliases = {name: {alias: d for (n, alias), d in log.decided.items() if n == name} for name in names}
    decisions = [d for d in reversed(log.decisions) if d.name][:50]
    canaries = [(c.began.name, c.began.candidate, summary(c)) for c in reversed(log.state(Canaries).values())][:10]
    return page(request, "models.html", aliases=aliases, decisions=decisions, canaries=canaries)


def waiting_candidates(studio: Studio) -> list[tuple[str, str]]:
    """(address, text) of registered candidates that are not champions, and that nobody has declined."""
    log = view(studio.output)
    decided = {(d.name, d.version) for d in log.decisions if d.action in ("promote", "decline")}
    return [
        (f"/promote/{name}", f"{name} version {decision.version}: promote it, or decline")
        for (name, alias), decision in sorted(log.decided.items())
        if name and alias == CANDIDATE and (name, decision.version) not in decided
    ]


def _reviewed(studio: Studio, name: str) -> tuple[LineageStore, promotion.PromotionReview]:
    """The review of `name`'s candidate. Raises NotPromoted where the audit or a gate refuses it."""
    store, node = resolve(f"{name}@candidate", studio.output, studio.tracking_uri)
    store = open_lineage_store(studio.output, studio.tracking_uri)
    champion = promotion.champion_of(store, name)
    comparison = None
    if champion is not None and champion.checkpoint != node.sha256:
        from xray.flows.promote import find_comparison

        comparison = find_comparison(store, node, champion.checkpoint, None)
    return store, promotion.review(store, node, name=name, comparison=comparison, public=studio.public)


def _seen(review: promotion.PromotionReview) -> str:
    """A digest that changes with everything a person decides on."""
    facts = [review.version, review.candidate.sha256, review.champion and review.champion.checkpoint, review.evidence]
    return digest([*facts, [gate.model_dump() for gate in review.gates]])


@router.get("/promote/{name}")
def review_page(request: Request, name: str) -> Response:
    studio = studio_of(request)
    shared: dict[str, Any] = {
        "name": name,
        "by": studio.by,
        "previous": view(studio.output).decided.get((name, promotion.PREVIOUS)),
    }
    try:
        store, reviewed = _reviewed(studio, name)
    except NotPromoted as error:
        return page(
            request, "promote.html", review=None, reasons=error.reasons, found=_candidate(studio, name), **shared
        )
    shown = store.graph.nodes[reviewed.evidence.get("comparison", reviewed.evidence["evaluation"])]
    samples = json.loads((shown.directory / "samples.json").read_text(encoding="utf-8"))[:6]
    judged = [store.graph.nodes[sha] for what, sha in reviewed.evidence.items() if what in ("evaluation", "comparison")]
    canary = canary_of(view(studio.output), reviewed.candidate.sha256)
    values: dict[str, Any] = {"review": reviewed, "seen": _seen(reviewed), "samples": samples}
    values |= {"found": measures(_evaluations(store, judged)), "lost": _lost(shown)}
    values |= {"canary": canary and summary(canary), "changes": _changes(store, reviewed)}
    return page(request, "promote.html", **shared | values)


def _candidate(studio: Studio, name: str) -> list[DrawnResult]:
    """The measurements of `name`'s candidate."""
    store = studio.store()
    registered = view(studio.output).decided.get((name, CANDIDATE))
    judged = store.graph.judgements_of(registered.checkpoint, Evaluation, Comparison) if registered else []
    return measures(_evaluations(store, [node for node in judged if _is_evaluated(node)]))


def _changes(store: LineageStore, reviewed: promotion.PromotionReview) -> dict[str, Any] | None:
    """Names of the stages that the candidate alone has, and (stage, aspect, field, the champion's, the candidate's) of
    what was done otherwise; None without a champion whose checkpoint is here."""
    champion = store.graph.nodes.get(reviewed.champion.checkpoint) if reviewed.champion is not None else None
    if champion is None:
        return None
    found = diff(store, champion, store, reviewed.candidate)
    rows = [
        (stage["stage"], aspect, field, str(before)[:MAX_CHANGE], str(after)[:MAX_CHANGE])
        for stage in found["stages"]
        for aspect in CAUSES
        for field, (before, after) in stage[aspect].items()
    ]
    return {"added": found["only_b"], "rows": rows[:MAX_CHANGES]}


@router.post("/promote/{name}")
def decide(request: Request, name: str, fields: Fields) -> Response:
    """The end of `xray promote`, after a person's answer; the audit and the gates are repeated."""
    studio, by, note = studio_of(request), fields.get("by", "").strip(), fields.get("note", "").strip()
    if not by or not note:
        raise ConfigError("by, note: are required: they are recorded with the decision")
    answer = fields.get("answer")
    if answer == "rollback":
        store = open_lineage_store(studio.output, studio.tracking_uri)
        promotion.roll_back(store, name=name, by=by, note=note, public=studio.public)
        return RedirectResponse("/promote", 303)
    if answer not in ("promote", "decline"):
        raise ConfigError(f"answer: {answer!r} is not allowed: must be promote, decline or rollback")
    store, reviewed = _reviewed(studio, name)
    if fields.get("seen") != _seen(reviewed):
        raise NotPromoted(["the evidence has changed since the page was shown: read it again"])
    act = promotion.promote if answer == "promote" else promotion.decline
    act(store, reviewed, by=by, note=note)
    return RedirectResponse("/promote", 303)
