"""The gates between a candidate and the champion: whose bounds count, and what each saw.

Bounds are those of the lifecycle that made the candidate: its evaluation's signed statement carries them. A gate whose
numbers are missing, null or NaN does not hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from xray_runtime.config.evaluate import PromotionConfig
from xray_runtime.lineage.attestation import read_statement
from xray_runtime.lineage.graph import Graph, Node
from xray_runtime.lineage.keys import trusted_keys
from xray_runtime.lineage.reference import LineageStore
from xray_runtime.lineage.signing import Verifier
from xray_runtime.lineage.terms import conflicts
from xray_runtime.stages.artifacts import Evaluation
from xray_runtime.store.manifest import ATTESTATION, SIGNATURE

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


class Gates(NamedTuple):
    """The bounds of the gates, and where they come from."""

    config: PromotionConfig
    origin: str


def evaluation_of(graph: Graph, policy: str) -> Node | None:
    """The latest evaluation of a policy."""

    def finished(node: Node) -> str:
        return node.statement.predicate.details.metadata.finished if node.statement else ""

    judged = graph.judgements_of(policy, Evaluation)
    return max(judged, key=lambda node: (finished(node), node.sha256), default=None)


def gates_for(store: LineageStore, candidate: Node, overrides: PromotionConfig | None, public: Path | None) -> Gates:
    """The gates of the lifecycle that made the candidate, as its evaluation's signed statement has them.

    Args:
        overrides: fields that were set by hand; they win.

    Raises:
        NotPromoted: there is no evaluation, or its statement is not signed as it must be.
    """
    evaluation = evaluation_of(store.graph, candidate.sha256)
    if evaluation is None:
        raise NotPromoted([NOT_EVALUATED])
    try:
        statement = read_statement(evaluation.directory)
        verifier = Verifier(trusted_keys(store.output, public))
        record, finished = evaluation.directory / ATTESTATION, statement.predicate.details.metadata.finished
        verifier.check(record, evaluation.directory / SIGNATURE, finished)
        contradictions = statement.contradicts(evaluation.manifest, evaluation.sha256)
        if contradictions:
            raise ValueError(f"it contradicts the checkpoint in {', '.join(contradictions)}")
        recorded = statement.predicate.details.run.gates
        gates = PromotionConfig.model_validate(recorded or {})
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise NotPromoted([f"the statement of {evaluation.name} does not vouch for its gates ({reason})"]) from None
    origin = f"as {evaluation.name} has them on record"
    if recorded is None:
        origin = f"the defaults: {evaluation.name} has none on record"
    changed = overrides.model_dump(exclude_unset=True) if overrides is not None else {}
    if changed:
        origin += f"; set by hand: {', '.join(sorted(changed))}"
    return Gates(gates.model_copy(update=changed), origin)


def check_gates(
    candidate: Node, evaluation: Node | None, champion: str | None, comparison: Node | None, gates: PromotionConfig
) -> list[Gate]:
    """Every gate that is on. One whose numbers are missing, null or NaN does not hold.

    Args:
        evaluation: of the candidate.
        champion: digest of the present champion, where there is one.
        comparison: of the two.
    """
    if evaluation is None:
        return [Gate(name="evaluated", passed=False, reason=NOT_EVALUATED)]
    found = [
        _gate(name, evaluation, check, bound)
        for name, check in CHECKS.items()
        if (bound := getattr(gates, name)) is not None
    ]
    if gates.max_regression is not None and champion is not None and champion != candidate.sha256:
        parents = comparison.manifest.parents if comparison is not None else {}
        if comparison is None or [parents.get(side) for side in comparison.sides] != [candidate.sha256, champion]:
            reason = f"the candidate was not compared with the champion {champion[:12]}"
            found.append(Gate(name="max_regression", passed=False, reason=reason))
        else:
            found.append(_gate("max_regression", comparison, _regression, gates.max_regression))
    return found


def check_licenses(graph: Graph, candidate: str, allowed: list[str]) -> Gate:
    """Whether all that the candidate (a sha256) goes back to may be used: the gate `allowed_licenses`."""
    found = list(map(str, conflicts(graph, candidate, allowed)))
    listed = ", ".join(allowed) or "none"
    reason = f"{'; '.join(found)}; allowed: {listed}" if found else f"every source is under one of {listed}"
    return Gate(name="allowed_licenses", passed=not found, reason=reason)


def _gate(name: str, node: Node, check: Check, bound: float) -> Gate:
    try:
        passed, reason = check(_Numbers(node), bound)
    except _MissingError as error:
        passed, reason = False, f"{error}: {name} cannot be checked (set promotion.{name}=null to go without)"
    return Gate(name=name, passed=passed, reason=reason)


class _MissingError(ValueError):
    """A number that a gate needs is not there."""


class _Numbers:
    """What an evaluation or a comparison found."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.has_gold = node.manifest.config.get("gold", True) is not None
        self.judge = node.results.get("judge")

    def __getitem__(self, name: str) -> float:
        return self._finite(name, self._node.results.get(name))

    def low(self, name: str) -> float:
        """The lower end of the 95% interval of `name`."""
        interval = self._node.results.get(f"{name}_ci95")
        return self._finite(f"{name}_ci95", interval[0] if isinstance(interval, list) and interval else interval)

    def _finite(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            shown = "null: nothing was judged" if name.startswith("win_rate") and value is None else json.dumps(value)
            raise _MissingError(f"{name} of {self._node.name} is {shown}")
        return float(value)


Check = Callable[[_Numbers, float], tuple[bool, str]]
"""(numbers, bound) → (whether the gate holds, what it saw)."""


def _win_rate(e: _Numbers, bound: float) -> tuple[bool, str]:
    low = e.low("win_rate")
    return low >= bound, f"win rate {e['win_rate']:.3f}, 95% from {low:.3f}; at least {bound}"


def _kl(e: _Numbers, bound: float) -> tuple[bool, str]:
    return e["kl"] <= bound, f"KL {e['kl']:.3f}; at most {bound}"


def _length(e: _Numbers, bound: float) -> tuple[bool, str]:
    before, after = max(e["length_before"], 1e-9), max(e["length_after"], 1e-9)
    return max(after / before, before / after) <= bound, f"length {before:.1f} → {after:.1f}; ratio at most {bound}"


def _gold(e: _Numbers, bound: float) -> tuple[bool, str]:
    if not e.has_gold:
        return True, "the lifecycle has no gold score that could fall"
    rise, delta = e["reward_after"] - e["reward_before"], e["gold_delta"]
    text = f"learned reward {rise:+.3f}, gold score {delta:+.3f}; a fall of at most {bound}"
    return rise <= 0 or -delta <= bound, text


def _regression(c: _Numbers, bound: float) -> tuple[bool, str]:
    low = c.low("win_rate")
    text = f"win rate over the champion {c['win_rate']:.3f}, 95% from {low:.3f} ({c.judge}, {c['samples']:.0f} prompts)"
    return low >= 0.5 - bound, f"{text}; at most {bound} below one half"


CHECKS: dict[str, Check] = {
    "min_win_rate": _win_rate,
    "max_kl": _kl,
    "max_length_ratio": _length,
    "max_gold_drop": _gold,
}
"""Gate of the evaluation alone → what checks it."""
