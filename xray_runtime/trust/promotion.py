"""Promotion: a candidate becomes champion when the audit is sound, every gate holds, and a person approves.

MLflow's aliases `champion` and `previous` follow the signed decisions. The decision is written first, so that after a
crash the audit names the alias that lags behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.evidence.view import Action, Decision
from xray_runtime.kernel.history.graph import CheckpointGraph, Node
from xray_runtime.kernel.history.promotion_check import Gate, canary_gates, refusals
from xray_runtime.kernel.history.reference import CHAMPION, LineageStore, champion_of
from xray_runtime.kernel.network import require_mlflow
from xray_runtime.kernel.tracking.registry import ADDRESS, ModelRegistry, open_client
from xray_runtime.methods.compare.kind import COMPARE
from xray_runtime.methods.evaluate.config import PromotionConfig
from xray_runtime.trust.approvals import check_approvals
from xray_runtime.trust.audit.checkpoints import audit
from xray_runtime.trust.gates import NOT_EVALUATED, NotPromoted, check_gates, check_licenses, evaluation_of, gates_for
from xray_runtime.trust.keys import sound_view
from xray_runtime.trust.log import decide
from xray_runtime.trust.model_page import write_pages

PREVIOUS = "previous"
SEEN = "seen"
VERDICTS = "verdicts"
OWN = ("policy", "champion", SEEN, VERDICTS)
"""Roles of a comparison that the candidate's evaluation does not have."""


@dataclass(frozen=True)
class PromotionReview:
    """A candidate that passed all checks, as a person sees it before deciding."""

    name: str
    version: str
    candidate: Node
    champion: Decision | None
    """The decision that made the present champion."""
    gates: list[Gate]
    gates_from: str
    """Source of their bounds."""
    evidence: dict[str, str]
    """`evaluation` and `comparison` → digest of the checkpoint the gates read."""
    check_approvals: Callable[[], list[Gate]]
    """Reads people's approvals again: one may be withdrawn while a person decides."""


class ComparisonSpec(NamedTuple):
    """The arguments of a call of the stage kind `compare`."""

    config: dict[str, Any]
    """Fields of an `EvaluationConfig`; its sources name the roles `rewards.N` and `judges.N`."""
    parents: dict[str, str]
    """Role → sha256."""
    seed: int
    runtime: dict[str, Any]
    """Device and threads that the evaluation ran with."""


def comparison_spec(
    graph: CheckpointGraph, candidate: Node, champion: str, verdicts: str | None = None
) -> ComparisonSpec:
    """The stage `compare`: the candidate's evaluation against the champion.

    Args:
        verdicts: sha256 of human verdicts on replies of these two; the people then count as a judge.

    Raises:
        NotPromoted: the candidate has no evaluation, or none that can be repeated; or the champion is not in the store.
    """
    evaluation = evaluation_of(graph, candidate.sha256)
    if evaluation is None:
        raise NotPromoted([NOT_EVALUATED])
    if champion not in graph.nodes:
        raise NotPromoted([f"the champion {champion[:12]} is not in the store, so there is nothing to compare with"])
    manifest = evaluation.manifest
    config = {name: value for name, value in manifest.config.items() if name != "runtime"}
    missing = [role.name for role in COMPARE.roles.values() if role.name not in OWN and not role.optional]
    missing = [role for role in missing if role not in manifest.parents]
    try:
        COMPARE.validated(config)
    except ConfigError as error:
        missing.append(str(error))
    if missing:
        reason = f"its evaluation, of kind {manifest.kind}, cannot be repeated with the champion ({'; '.join(missing)})"
        raise NotPromoted([f"{reason}: set promotion.max_regression=null, or evaluate it with `evaluate`"])
    roles = {"policy": candidate.sha256, "champion": champion}
    roles |= {VERDICTS: verdicts} if verdicts is not None else {}
    roles |= {
        role: sha
        for role, sha in manifest.parents.items()
        if (name := role.partition(".")[0]) in COMPARE.roles and name not in OWN
    }
    behind = set(graph.ancestors([candidate.sha256]))
    foreign = [sha for sha in graph.ancestors([champion]) if sha not in behind and sha in graph.nodes]
    foreign = [sha for sha in foreign if graph.nodes[sha].is_data]
    roles |= {f"{SEEN}.{number}": sha for number, sha in enumerate(foreign)}
    return ComparisonSpec(config, roles, manifest.seed, dict(manifest.config.get("runtime", {})))


def review(
    store: LineageStore,
    candidate: Node,
    *,
    name: str,
    gates: PromotionConfig | None = None,
    comparison: Node | None = None,
    public: Path | None = None,
) -> PromotionReview:
    """Audit the candidate and what it is compared with, and check the gates.

    Args:
        gates: gates set by hand, which override those that `gates_for` finds.

    Raises:
        NotPromoted: the audit found something, or a gate does not hold.
        ConfigError: the candidate is not a version of `name`; or as `gates_for`.
    """
    _require_not_withdrawn(store, candidate)
    version = ModelRegistry(open_client(_uri(store))).version_of(name, candidate.sha256)
    if version is None:
        raise ConfigError(f"--name: {name!r} has no version with checkpoint {candidate.sha256[:12]}")
    _require_sound(store, [candidate, *([comparison] if comparison else [])], public)
    bounds = gates_for(store, candidate, gates, public)
    champion = champion_of(store, name)
    before = champion.checkpoint if champion is not None else None
    checked = check_gates(store.graph, candidate, bounds.evaluation, before, comparison, bounds.config)
    if bounds.config.canary and champion is not None:
        checked += canary_gates(store.output, candidate.sha256, champion.checkpoint, public)
    if bounds.config.allowed_licenses is not None:
        checked.append(check_licenses(store.graph, candidate.sha256, bounds.config.allowed_licenses))
    approvals = partial(_check_approvals, store, name, candidate, bounds.approvals, public)
    checked += approvals()
    _require_passed(checked)
    evidence = {"evaluation": bounds.evaluation, "comparison": comparison}
    return PromotionReview(
        name=name,
        version=version,
        candidate=candidate,
        champion=champion,
        gates=checked,
        gates_from=bounds.origin,
        evidence={what: node.sha256 for what, node in evidence.items() if node is not None},
        check_approvals=approvals,
    )


def promote(store: LineageStore, seen: PromotionReview, *, by: str, note: str) -> None:
    """Write the decision and move the aliases. If the candidate already is champion, the aliases are set again.

    Raises NotPromoted where another champion was chosen, or an approval withdrawn, since the review.
    """
    _require_not_withdrawn(store, seen.candidate)
    _require_passed(seen.check_approvals())
    if champion_of(store, seen.name) != seen.champion:
        raise NotPromoted(["another champion was chosen in the meantime; start again"])
    target = (seen.version, seen.candidate.sha256)
    if seen.champion is None or seen.champion.checkpoint != seen.candidate.sha256:
        _move_champion(store, "promote", seen.name, target, seen.champion, by, note, _reviewed(seen))
    _move_aliases(store, seen.name)


def decline(store: LineageStore, seen: PromotionReview, *, by: str, note: str) -> None:
    """Record that a person refused; no alias moves."""
    fields = _reviewed(seen) | {"name": seen.name, "alias": CHAMPION, "checkpoint": seen.candidate.sha256}
    decide(store.output, by=by, note=note, action="decline", version=seen.version, **fields)
    _move_aliases(store, seen.name, seen.version)


def roll_back(store: LineageStore, *, name: str, by: str, note: str, public: Path | None = None) -> Decision:
    """Make the previous champion champion again; returns the decision that had made it so.

    Raises ConfigError where there is no previous champion, NotPromoted where its audit found something.
    """
    decisions = view(store.output).decided
    present, before = decisions.get((name, CHAMPION)), decisions.get((name, PREVIOUS))
    if present is None or before is None:
        raise ConfigError(f"--rollback: {name!r} has no previous champion in {store.output}")
    if before.checkpoint not in store.graph.nodes:
        raise NotPromoted([f"the previous champion {before.checkpoint[:12]} is not in the store"])
    _require_not_withdrawn(store, store.graph.nodes[before.checkpoint])
    _require_sound(store, [store.graph.nodes[before.checkpoint]], public)
    _move_champion(store, "rollback", name, (before.version, before.checkpoint), present, by, note, {})
    _move_aliases(store, name)
    return before


def _require_not_withdrawn(store: LineageStore, node: Node) -> None:
    if refused := list(refusals(store, node)):
        raise NotPromoted(refused)


def _require_sound(store: LineageStore, nodes: list[Node], public: Path | None) -> None:
    broken = audit(store, nodes, public=public).broken
    if broken:
        raise NotPromoted([f"the audit found {reason}" for reason in broken])


def _check_approvals(
    store: LineageStore, name: str, candidate: Node, bounds: Sequence[PromotionConfig], public: Path | None
) -> list[Gate]:
    """The gate of each evaluation that asks for approvals."""
    if not bounds:
        return []
    log = sound_view(store.output, public)
    return [check_approvals(log, name, candidate.sha256, one) for one in bounds]


def _require_passed(gates: list[Gate]) -> None:
    if failed := [gate.reason for gate in gates if not gate.passed]:
        raise NotPromoted(failed)


def _reviewed(seen: PromotionReview) -> dict[str, Any]:
    """Fields of a decision that record the review before it."""
    gates = [gate.model_dump() for gate in seen.gates]
    return {"gates": gates, "gates_from": seen.gates_from, "evidence": seen.evidence}


def _move_champion(
    store: LineageStore,
    action: Action,
    name: str,
    to: tuple[str, str],
    present: Decision | None,
    by: str,
    note: str,
    reviewed: dict[str, Any],
) -> None:
    """Decide `previous` and `champion`; `to`: (version, checkpoint) of the new champion."""
    # The champion comes last: after a crash before it, the same command decides both again.
    moves = ({PREVIOUS: (present.version, present.checkpoint)} if present else {}) | {CHAMPION: to}
    for alias, (version, sha256) in moves.items():
        fields = reviewed | {"name": name, "alias": alias, "version": version, "checkpoint": sha256}
        decide(store.output, by=by, note=note, action=action, **fields)


def _move_aliases(store: LineageStore, name: str, *others: str) -> None:
    """Point MLflow's aliases where the decisions say, and write the pages of these versions and of `others`."""
    decisions, registry = view(store.output).decided, ModelRegistry(open_client(_uri(store)))
    decided = {alias: decisions[name, alias].version for alias in (CHAMPION, PREVIOUS) if (name, alias) in decisions}
    registry.set_aliases(name, decided)
    write_pages(registry, store.output, name, {*decided.values(), *others}, store.graph.nodes)


def _uri(store: LineageStore) -> str:
    if store.tracking_uri is None:
        raise ConfigError("--tracking-uri: is required: the output directory has no MLflow store of its own")
    require_mlflow(ADDRESS, store.tracking_uri)
    return store.tracking_uri
