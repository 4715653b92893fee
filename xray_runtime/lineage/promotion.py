"""Promotion: a candidate becomes champion when the audit is sound, every gate holds, and a person says so.

MLflow's aliases `champion` and `previous` follow the signed chain of decisions, never the other way round: the decision
is written first, so that after a crash the audit names the alias that lags behind.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from xray_runtime.checkpoints.store import read_bounded
from xray_runtime.config_io import ConfigError
from xray_runtime.lineage.audit import audit
from xray_runtime.lineage.decisions import Decision, current, decide
from xray_runtime.lineage.graph import Graph, Node
from xray_runtime.lineage.reference import Place
from xray_runtime.lineage.signing import signing_key

CHAMPION, PREVIOUS = "champion", "previous"


class Gates(BaseModel):
    """What an evaluation must show. None turns a gate off."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_win_rate: float | None = Field(0.5, ge=0, le=1)
    """The lower end of the win rate's 95% interval, over the SFT model."""
    max_kl: float | None = Field(20.0, gt=0)
    """Nats a reply, to the SFT model."""
    max_length_ratio: float | None = Field(2.0, ge=1)
    """Length of replies after to before, and before to after."""
    max_gold_drop: float | None = Field(0.0, ge=0)
    """While the learned reward rises, the gold score may fall by no more: it is a sign of reward hacking."""
    max_regression: float | None = Field(0.05, ge=0, le=1)
    """Win rate may be this much below the champion's, on the same prompts."""


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


def check_gates(graph: Graph, candidate: Node, champion: str | None, gates: Gates) -> list[Gate]:
    """Every gate that is on.

    Args:
        champion: digest of the present champion, where there is one.
    """
    evaluation = _evaluation(graph, candidate.sha256)
    if evaluation is None:
        return [Gate(name="evaluated", passed=False, reason="the candidate has no evaluation in the store")]
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
            gate("max_regression", *_regression(graph, evaluation, champion, gates.max_regression))
    except (KeyError, TypeError, IndexError) as error:
        gate("evaluated", False, f"the evaluation lacks a number ({error})")
    return found


def promote(
    place: Place, candidate: Node, *, name: str, gates: Gates, by: str, note: str, public: Path | None = None
) -> list[Gate]:
    """Audit, check the gates, write the decision, move the aliases.

    Args:
        by: who approves: a claim, recorded as such.

    Raises:
        NotPromoted: the audit found something, or a gate does not hold.
        ConfigError: the candidate is not a version of `name`.
    """
    uri = _uri(place)
    version = _version(uri, name, candidate.sha256)
    result = audit(place, [candidate], public=public)
    broken = sorted({f"{f.code} ({f.subject})" for f in result.findings if f.is_broken})
    if broken:
        raise NotPromoted([f"the audit found {reason}" for reason in broken])
    present = current(place.output).get((name, CHAMPION))
    checked = check_gates(place.graph, candidate, present.checkpoint if present else None, gates)
    failed = [gate.reason for gate in checked if not gate.passed]
    if failed:
        raise NotPromoted(failed)
    if present is None or present.checkpoint != candidate.sha256:
        _move(place, uri, "promote", name, (version, candidate.sha256), present, by, note, checked)
    return checked


def roll_back(place: Place, *, name: str, by: str, note: str) -> Decision:
    """Make the previous champion champion again; returns the decision it goes back to.

    Raises:
        ConfigError: there is no previous champion.
    """
    decisions = current(place.output)
    present, before = decisions.get((name, CHAMPION)), decisions.get((name, PREVIOUS))
    if present is None or before is None:
        raise ConfigError(f"--rollback: {name!r} has no previous champion in {place.output}")
    _move(place, _uri(place), "rollback", name, (before.version, before.checkpoint), present, by, note, [])
    return before


def _move(
    place: Place,
    uri: str,
    action: Any,
    name: str,
    to: tuple[str, str],
    present: Decision | None,
    by: str,
    note: str,
    checked: list[Gate],
) -> None:
    from xray_runtime.lineage.tracking import set_aliases

    key = signing_key(place.output)
    moves = {CHAMPION: to} | ({PREVIOUS: (present.version, present.checkpoint)} if present else {})
    for alias, (version, sha256) in moves.items():
        decide(
            place.output,
            key,
            action=action,
            name=name,
            alias=alias,
            version=version,
            checkpoint=sha256,
            by=by,
            note=note,
            gates=[gate.model_dump() for gate in checked],
        )
    set_aliases(uri, name, {alias: version for alias, (version, _) in moves.items()})


def _regression(graph: Graph, evaluation: Node, champion: str, allowed: float) -> tuple[bool, str]:
    theirs = _evaluation(graph, champion)
    if theirs is None:
        return False, f"the champion {champion[:12]} has no evaluation in the store"
    if _prompts(evaluation) != _prompts(theirs):
        return False, f"the champion {champion[:12]} was judged on other prompts"
    mine, other = evaluation.results["win_rate"], theirs.results["win_rate"]
    return mine >= other - allowed, f"win rate {mine:.3f}, champion's {other:.3f}; at most {allowed} below"


def _evaluation(graph: Graph, policy: str) -> Node | None:
    """The latest evaluation of a policy."""
    judged = [graph.nodes[child] for role, child in graph.children.get(policy, []) if role == "policy"]
    judged = [node for node in judged if node.manifest.kind == "evaluate"]

    def finished(node: Node) -> str:
        return node.statement.predicate.details.metadata.finished if node.statement else ""

    return max(judged, key=lambda node: (finished(node), node.sha256), default=None)


def _prompts(evaluation: Node) -> list[str]:
    found: list[str] = json.loads(read_bounded(evaluation.directory / "prompts.json"))
    return sorted(found)


def _uri(place: Place) -> str:
    if place.tracking_uri is None:
        raise ConfigError("--tracking-uri: is required: the output directory has no MLflow store of its own")
    return place.tracking_uri


def _version(uri: str, name: str, sha256: str) -> str:
    from xray_runtime.lineage.tracking import registered_version

    version = registered_version(uri, name, sha256)
    if version is None:
        raise ConfigError(f"--name: {name!r} has no version with checkpoint {sha256[:12]}")
    return version
