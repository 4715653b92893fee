"""Promotion: a candidate becomes champion when the audit is sound, every gate holds, and a person says so.

MLflow's aliases `champion` and `previous` follow the signed chain of decisions, never the other way round: the decision
is written first, so that after a crash the audit names the alias that lags behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from xray_runtime.config.evaluate import PromotionConfig
from xray_runtime.config.validation import ConfigError
from xray_runtime.lineage.audit.checkpoints import audit
from xray_runtime.lineage.audit.contamination import DATASET_KINDS
from xray_runtime.lineage.decisions import Action, Decision, current, decide
from xray_runtime.lineage.graph import Graph, Node
from xray_runtime.lineage.reference import LineageStore
from xray_runtime.lineage.signing import signing_key
from xray_runtime.stages.spec import SEEN_BY_CHAMPION

CHAMPION, PREVIOUS = "champion", "previous"
NOT_EVALUATED = "the candidate has no evaluation in the store"


class Gate(BaseModel):
    """One gate and what it saw."""

    name: str
    passed: bool
    reason: str


class NotPromoted(ValueError):
    """The candidate stays what it is; `reasons` say why."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("not promoted: " + "; ".join(reasons))
        self.reasons = reasons


@dataclass(frozen=True)
class Review:
    """What a person is shown before deciding: a candidate that passed everything."""

    name: str
    version: str
    candidate: Node
    champion: Decision | None
    """The decision that made the present champion."""
    gates: list[Gate]
    evidence: dict[str, str]
    """`evaluation` and `comparison` → digest of the checkpoint the gates read."""


def champion_of(store: LineageStore, name: str) -> Decision | None:
    """The decision that made the present champion of the registered model `name`."""
    return current(store.output).get((name, CHAMPION))


def evaluation_of(graph: Graph, policy: str) -> Node | None:
    """The latest evaluation of a policy."""
    judged = [graph.nodes[child] for role, child in graph.children.get(policy, []) if role == "policy"]
    judged = [node for node in judged if node.manifest.kind == "evaluate"]

    def finished(node: Node) -> str:
        return node.statement.predicate.details.metadata.finished if node.statement else ""

    return max(judged, key=lambda node: (finished(node), node.sha256), default=None)


def comparison_spec(graph: Graph, candidate: Node, champion: str) -> tuple[dict[str, Any], dict[str, str]]:
    """(config sections, role → digest) of the stage `compare`: the candidate's evaluation against the champion.

    Raises:
        NotPromoted: there is no evaluation of the candidate, or no champion in the store.
    """
    evaluation = evaluation_of(graph, candidate.sha256)
    if evaluation is None:
        raise NotPromoted([NOT_EVALUATED])
    if champion not in graph.nodes:
        raise NotPromoted([f"the champion {champion[:12]} is not in the store: nothing to compare with"])
    behind = set(graph.ancestors([candidate.sha256]))
    foreign = [
        sha
        for sha in graph.ancestors([champion])
        if sha not in behind and sha in graph.nodes and graph.nodes[sha].manifest.kind in DATASET_KINDS
    ]
    roles = {"policy": candidate.sha256, "champion": champion}
    roles |= {role: evaluation.manifest.parents[role] for role in ("reward", "dataset")}
    roles |= {f"{SEEN_BY_CHAMPION}{number}": sha for number, sha in enumerate(foreign, start=1)}
    return evaluation.manifest.sections, roles


def check_gates(
    candidate: Node, evaluation: Node | None, champion: str | None, comparison: Node | None, gates: PromotionConfig
) -> list[Gate]:
    """Every gate that is on.

    Args:
        evaluation: of the candidate.
        champion: digest of the present champion, where there is one.
        comparison: of the two.
    """
    if evaluation is None:
        return [Gate(name="evaluated", passed=False, reason=NOT_EVALUATED)]
    e, found = evaluation.results, []

    def gate(name: str, passed: bool, reason: str) -> None:
        found.append(Gate(name=name, passed=passed, reason=reason))

    try:
        if gates.min_win_rate is not None:
            low = e["win_rate_ci95"][0]
            text = f"win rate {e['win_rate']:.3f}, 95% from {low:.3f}; at least {gates.min_win_rate}"
            gate("min_win_rate", low >= gates.min_win_rate, text)
        if gates.max_kl is not None:
            gate("max_kl", e["kl"] <= gates.max_kl, f"KL {e['kl']:.3f}; at most {gates.max_kl}")
        if gates.max_length_ratio is not None:
            before, after = max(e["length_before"], 1e-9), max(e["length_after"], 1e-9)
            ratio = max(after / before, before / after)
            text = f"length {before:.1f} → {after:.1f}; ratio at most {gates.max_length_ratio}"
            gate("max_length_ratio", ratio <= gates.max_length_ratio, text)
        if gates.max_gold_drop is not None and e.get("gold_delta") is not None:
            rise, drop = e["reward_after"] - e["reward_before"], -e["gold_delta"]
            text = f"learned reward {rise:+.3f}, gold score {-drop:+.3f}; a fall of at most {gates.max_gold_drop}"
            gate("max_gold_drop", rise <= 0 or drop <= gates.max_gold_drop, text)
        if gates.max_regression is not None and champion is not None and champion != candidate.sha256:
            parents = comparison.manifest.parents if comparison is not None else {}
            if comparison is None or (parents.get("policy"), parents.get("champion")) != (candidate.sha256, champion):
                gate("max_regression", False, f"the candidate was not compared with the champion {champion[:12]}")
                return found
            c = comparison.results
            low = c["win_rate_ci95"][0]
            text = f"win rate over the champion {c['win_rate']:.3f}, 95% from {low:.3f} ({c['judge']}, {c['samples']}"
            text += f" prompts); at most {gates.max_regression} below one half"
            gate("max_regression", low >= 0.5 - gates.max_regression, text)
    except (KeyError, TypeError, IndexError) as error:
        gate("evaluated", False, f"the evaluation lacks a number ({error})")
    return found


def review(
    store: LineageStore,
    candidate: Node,
    *,
    name: str,
    gates: PromotionConfig,
    comparison: Node | None = None,
    public: Path | None = None,
) -> Review:
    """Audit the candidate and what it is compared with, and check the gates.

    Raises:
        NotPromoted: the audit found something, or a gate does not hold.
        ConfigError: the candidate is not a version of `name`.
    """
    version = _version(_uri(store), name, candidate.sha256)
    _require_sound(store, [candidate, *([comparison] if comparison else [])], public)
    evaluation = evaluation_of(store.graph, candidate.sha256)
    champion = champion_of(store, name)
    checked = check_gates(candidate, evaluation, champion.checkpoint if champion else None, comparison, gates)
    failed = [gate.reason for gate in checked if not gate.passed]
    if failed:
        raise NotPromoted(failed)
    evidence = {"evaluation": evaluation, "comparison": comparison}
    return Review(
        name=name,
        version=version,
        candidate=candidate,
        champion=champion,
        gates=checked,
        evidence={what: node.sha256 for what, node in evidence.items() if node is not None},
    )


def promote(store: LineageStore, seen: Review, *, by: str, note: str) -> None:
    """Write the decision and move the aliases. Where the candidate is champion already, the aliases follow again.

    Args:
        by: who approves: a claim, recorded as such.

    Raises:
        NotPromoted: another champion was chosen since the review.
    """
    if champion_of(store, seen.name) != seen.champion:
        raise NotPromoted(["another champion was chosen in the meantime; start again"])
    if seen.champion is None or seen.champion.checkpoint != seen.candidate.sha256:
        _decide_move(store, "promote", seen.name, (seen.version, seen.candidate.sha256), seen.champion, by, note, seen)
    _follow(store, seen.name)


def decline(store: LineageStore, seen: Review, *, by: str, note: str) -> None:
    """Record that a person said no; no alias moves."""
    decide(
        store.output,
        signing_key(store.output),
        action="decline",
        name=seen.name,
        alias=CHAMPION,
        version=seen.version,
        checkpoint=seen.candidate.sha256,
        by=by,
        note=note,
        gates=[gate.model_dump() for gate in seen.gates],
        evidence=seen.evidence,
    )


def roll_back(store: LineageStore, *, name: str, by: str, note: str, public: Path | None = None) -> Decision:
    """Make the previous champion champion again; returns the decision it goes back to.

    Raises:
        ConfigError: there is no previous champion.
        NotPromoted: its audit found something.
    """
    decisions = current(store.output)
    present, before = decisions.get((name, CHAMPION)), decisions.get((name, PREVIOUS))
    if present is None or before is None:
        raise ConfigError(f"--rollback: {name!r} has no previous champion in {store.output}")
    if before.checkpoint not in store.graph.nodes:
        raise NotPromoted([f"the previous champion {before.checkpoint[:12]} is not in the store"])
    _require_sound(store, [store.graph.nodes[before.checkpoint]], public)
    _decide_move(store, "rollback", name, (before.version, before.checkpoint), present, by, note, None)
    _follow(store, name)
    return before


def _require_sound(store: LineageStore, nodes: list[Node], public: Path | None) -> None:
    broken = audit(store, nodes, public=public).broken
    if broken:
        raise NotPromoted([f"the audit found {reason}" for reason in broken])


def _decide_move(
    store: LineageStore,
    action: Action,
    name: str,
    to: tuple[str, str],
    present: Decision | None,
    by: str,
    note: str,
    seen: Review | None,
) -> None:
    key = signing_key(store.output)
    # The champion last: cut short before it, the same command decides both again.
    moves = ({PREVIOUS: (present.version, present.checkpoint)} if present else {}) | {CHAMPION: to}
    for alias, (version, sha256) in moves.items():
        decide(
            store.output,
            key,
            action=action,
            name=name,
            alias=alias,
            version=version,
            checkpoint=sha256,
            by=by,
            note=note,
            gates=[gate.model_dump() for gate in seen.gates] if seen else [],
            evidence=seen.evidence if seen else {},
        )


def _follow(store: LineageStore, name: str) -> None:
    """Point MLflow's aliases to what was decided."""
    from xray_runtime.tracking.mlflow_tracker import set_aliases

    decisions = current(store.output)
    decided = {alias: decisions[name, alias].version for alias in (CHAMPION, PREVIOUS) if (name, alias) in decisions}
    set_aliases(_uri(store), name, decided)


def _uri(store: LineageStore) -> str:
    if store.tracking_uri is None:
        raise ConfigError("--tracking-uri: is required: the output directory has no MLflow store of its own")
    return store.tracking_uri


def _version(uri: str, name: str, sha256: str) -> str:
    from xray_runtime.tracking.mlflow_tracker import registered_version

    version = registered_version(uri, name, sha256)
    if version is None:
        raise ConfigError(f"--name: {name!r} has no version with checkpoint {sha256[:12]}")
    return version
