"""The gates between a candidate and the champion: their bounds and their results.

The bounds are those of the lifecycle that made the candidate, from its evaluation's signed statement. Only judges that
the store shows to be independent of the candidate count, and a gate must hold for each of them. A gate fails if its
numbers are missing, null or NaN, or if there is no such judge.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.envelope import Verifier
from xray_runtime.kernel.evidence.statement import verified_statement
from xray_runtime.kernel.graph.artifacts import Evaluation
from xray_runtime.kernel.history.graph import CheckpointGraph, Node
from xray_runtime.kernel.history.promotion_check import Gate
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.methods.evaluate.config import PEOPLE, PromotionConfig
from xray_runtime.trust.keys import trusted_keys
from xray_runtime.trust.leaky_judges import leaky_judges

NOT_EVALUATED = "the candidate has no evaluation in the store"
NO_JUDGE = "set gold, evaluate.judges or evaluate.heldout_reward_model, or "


class NotPromoted(ValueError):
    """The candidate is not promoted; `reasons` say why."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("not promoted: " + "; ".join(reasons))
        self.reasons = reasons


class Gates(NamedTuple):
    """The bounds of the gates, where they come from, and the candidate's evaluation."""

    config: PromotionConfig
    origin: str
    evaluation: Node
    approvals: list[PromotionConfig]
    """Those of all its evaluations that ask for approvals: one that is added later takes none of them back."""


def evaluation_of(graph: CheckpointGraph, policy: str) -> Node | None:
    """The latest evaluation of a policy."""
    judged = graph.judgements_of(policy, Evaluation)
    return max(judged, key=lambda node: (node.finished, node.sha256), default=None)


def gates_for(store: LineageStore, candidate: Node, overrides: PromotionConfig | None, public: Path | None) -> Gates:
    """The gates of the lifecycle that made the candidate, as its evaluation's signed statement has them.

    Args:
        overrides: fields set by hand, which count first.

    Raises:
        NotPromoted: there is no evaluation, or its statement is not signed as it must be.
        ConfigError: the approvals of others are overridden.
    """
    changed = changed_by_hand(overrides)
    evaluation = evaluation_of(store.graph, candidate.sha256)
    if evaluation is None:
        raise NotPromoted([NOT_EVALUATED])
    judged = store.graph.judgements_of(candidate.sha256, Evaluation)
    recorded = {one.sha256: _recorded(store, one, public) for one in judged}
    gates = recorded[evaluation.sha256]
    origin = f"as {evaluation.name} has them on record"
    if gates is None:
        origin = f"the defaults: {evaluation.name} has none on record"
    if changed:
        origin += f"; set by hand: {', '.join(sorted(changed))}"
    approvals: list[PromotionConfig] = []
    for each in recorded.values():
        known = [(one.approvals, set(one.approvers)) for one in approvals]
        if each is not None and each.approvals is not None and (each.approvals, set(each.approvers)) not in known:
            approvals.append(each)
    return Gates((gates or PromotionConfig()).model_copy(update=changed), origin, evaluation, approvals)


def _recorded(store: LineageStore, evaluation: Node, public: Path | None) -> PromotionConfig | None:
    """The gates in an evaluation's signed statement. Raises NotPromoted: it is not signed as it must be."""
    try:
        statement = verified_statement(evaluation.directory, Verifier(trusted_keys(store.output, public)))
        contradictions = statement.contradicts(evaluation.manifest, evaluation.sha256)
        if contradictions:
            raise ValueError(f"it contradicts the checkpoint in {', '.join(contradictions)}")
        recorded = statement.predicate.details.run.gates
        return PromotionConfig.model_validate(recorded) if recorded is not None else None
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise NotPromoted([f"the statement of {evaluation.name} does not vouch for its gates ({reason})"]) from None


def changed_by_hand(overrides: PromotionConfig | None) -> dict[str, Any]:
    """The bounds that are set by hand. Raises ConfigError: the approvals of others are among them."""
    changed = overrides.model_dump(exclude_unset=True) if overrides is not None else {}
    if fixed := sorted({"approvals", "approvers"} & changed.keys()):
        raise ConfigError(f"--set: promotion.{fixed[0]} is not allowed: only the lifecycle's config sets it")
    return changed


def check_gates(
    graph: CheckpointGraph,
    candidate: Node,
    evaluation: Node,
    champion: str | None,
    comparison: Node | None,
    gates: PromotionConfig,
) -> list[Gate]:
    """Every gate that is on. `champion`: digest of the present one; `comparison`: of the candidate with it."""
    bounds = {name: getattr(gates, name) for name in CHECKS}
    found = [_gate(graph, name, evaluation, CHECKS[name], at) for name, at in bounds.items() if at is not None]
    if gates.max_regression is not None and champion is not None and champion != candidate.sha256:
        parents = comparison.manifest.parents if comparison is not None else {}
        if comparison is None or [parents.get(side) for side in comparison.sides] != [candidate.sha256, champion]:
            reason = f"the candidate was not compared with the champion {champion[:12]}"
            found.append(Gate(name="max_regression", passed=False, reason=reason))
        else:
            found.append(_gate(graph, "max_regression", comparison, _regression, gates.max_regression))
    return found


def check_licenses(graph: CheckpointGraph, candidate: str, allowed: list[str]) -> Gate:
    """Whether every source behind the candidate (a sha256) may be used: the gate `allowed_licenses`."""
    found = list(conflicts(graph, candidate, allowed))
    listed = ", ".join(allowed) or "none"
    reason = f"{'; '.join(found)}; allowed: {listed}" if found else f"every source is under one of {listed}"
    return Gate(name="allowed_licenses", passed=not found, reason=reason)


def conflicts(graph: CheckpointGraph, model: str, allowed: list[str]) -> Iterator[str]:
    """Every source behind `model` (a sha256) without a licence in `allowed`, and its path to the model.

    The sources of a reward model count too: the policy learned from its scores.
    """
    names = {name.casefold() for name in allowed}
    for sha in graph.ancestors([model]):
        node = graph.nodes.get(sha)
        sources: list[tuple[str, str | None]]
        if node is None:
            sources = [(f"checkpoint {sha[:12]}, which is not in the store,", None)]
        elif node.statement is None:
            sources = [(f"{node.name}, which has no statement,", None)]
        else:
            read = graph.own_sources(sha)
            sources = [(f"{outside.name} ({outside.field})", outside.terms.license) for outside in read]
        for source, licence in sources:
            if not licence or licence.casefold() not in names:
                has = f"has the licence {licence}" if licence else "has no licence on record"
                yield f"{source} {has}: {' → '.join(_path(graph, sha, model))}"


def _path(graph: CheckpointGraph, start: str, end: str) -> list[str]:
    """A shortest path from a checkpoint to a descendant."""
    after, pending = {end: ""}, deque([end])
    while start not in after:
        child = pending.popleft()
        for _, parent in graph.parents(child):
            if parent not in after:
                after[parent] = child
                pending.append(parent)
    way = [start]
    while way[-1] != end:
        way.append(after[way[-1]])
    return [graph.nodes[sha].name if sha in graph.nodes else sha[:12] for sha in way]


def _gate(graph: CheckpointGraph, name: str, node: Node, check: Check, bound: float) -> Gate:
    try:
        passed, reason = check(_Numbers(graph, node), bound)
    except _MissingError as error:
        passed, reason = False, f"{error}: {name} cannot be checked ({error.remedy.format(name=name)})"
    return Gate(name=name, passed=passed, reason=reason)


class _MissingError(ValueError):
    """A number that a gate needs is missing; `remedy` precedes what switches the gate off."""

    def __init__(self, text: str, remedy: str = "set ") -> None:
        super().__init__(text)
        self.remedy = remedy + "promotion.{name}=null to go without"


class _Numbers:
    """The results of an evaluation or a comparison."""

    def __init__(self, graph: CheckpointGraph, node: Node) -> None:
        self._graph, self._node, self.results = graph, node, node.results

    def __getitem__(self, name: str) -> float:
        return self.finite(name, self.results.get(name))

    def judges(self) -> list[_Judged]:
        """The results by each independent judge. Raises _MissingError where there is none."""
        judges = self.results.get("judges")
        listed = judges.items() if isinstance(judges, dict) else ()
        by_judge = {name: found for name, found in listed if isinstance(found, dict) and found.get("judges") is True}
        if "verdicts" not in self._node.manifest.parents:
            by_judge.pop(PEOPLE, None)
        if not by_judge:
            raise _MissingError(f"{self._node.name} has no judge", NO_JUDGE)
        try:
            dependent = leaky_judges(self._graph, self._node)
        except ValueError as error:
            raise _MissingError(str(error)) from None
        independent = [_Judged(self, name, found) for name, found in by_judge.items() if name not in dependent]
        if not independent:
            whys = "; ".join(f"{name}: {dependent[name]}" for name in by_judge)
            raise _MissingError(f"no judge of {self._node.name} is independent ({whys})", NO_JUDGE)
        return independent

    def finite(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _MissingError(f"{name} of {self._node.name} is {json.dumps(value)}")
        return float(value)


class _Judged(NamedTuple):
    numbers: _Numbers
    name: str
    found: dict[str, Any]

    def number(self, name: str) -> float:
        return self.numbers.finite(f"{name} by {self.name}", self.found.get(name))

    def outcomes(self) -> tuple[int, int, int]:
        """Prompts won, lost and tied."""
        won, lost, tied = (int(self.number(name)) for name in ("won", "lost", "tied"))
        return won, lost, tied

    def improves(self, bound: float) -> tuple[bool, str]:
        """(whether it wins more than `bound` of the prompts that are not tied, beyond chance; the result as text)."""
        won, lost, tied = self.outcomes()
        if not won + lost:
            return False, f"{self.name}: all {tied} prompts are tied, which shows no improvement"
        low, text = self._interval(won / (won + lost), won + lost, "of those not tied", bound)
        return low > bound, text

    def keeps_up(self, bound: float) -> tuple[bool, str]:
        """(whether it wins at least `bound` of all prompts, ties by half, beyond chance; the result as text)."""
        won, lost, tied = self.outcomes()
        total = won + lost + tied
        if not total:
            return False, f"{self.name}: no prompt was compared"
        low, text = self._interval((won + tied / 2) / total, total, "with ties by half", bound)
        return low >= bound, text

    def _interval(self, rate: float, trials: int, how: str, bound: float) -> tuple[float, str]:
        """(lower end of the 95% interval of a rate, the result as text)."""
        # Late: it imports torch, which commands that only read a store do not need.
        from xray_runtime.algorithms.statistics import trials_needed, wilson_interval

        won, lost, tied = self.outcomes()
        low, _ = wilson_interval(rate, trials)
        text = f"{self.name}: {won} won, {lost} lost, {tied} tied; win rate {rate:.3f} {how}, 95% from {low:.3f}"
        needed = trials_needed(rate, bound)
        if needed is not None and needed > trials:
            more = math.ceil((needed - trials) * (won + lost + tied) / trials)
            text += f" (at this rate about {more} more prompts are needed)"
        return low, text


Check = Callable[[_Numbers, float], tuple[bool, str]]
"""(numbers, bound) → (whether the gate holds, its result as text)."""


def _win_rate(e: _Numbers, bound: float) -> tuple[bool, str]:
    found = [judge.improves(bound) for judge in e.judges()]
    return all(holds for holds, _ in found), f"{'; '.join(text for _, text in found)}; must be above {bound:g}"


def _kl(e: _Numbers, bound: float) -> tuple[bool, str]:
    return e["kl"] <= bound, f"KL {e['kl']:.3f}; at most {bound}"


def _length(e: _Numbers, bound: float) -> tuple[bool, str]:
    before, after = max(e["length_before"], 1e-9), max(e["length_after"], 1e-9)
    return max(after / before, before / after) <= bound, f"length {before:.1f} → {after:.1f}; ratio at most {bound}"


def _judge_drop(e: _Numbers, bound: float) -> tuple[bool, str]:
    judges = e.judges()
    falls = ", ".join(f"{j.number('delta'):+.3f} ({j.name})" for j in judges)
    fell = not all(-j.number("delta") <= bound for j in judges)
    if e.results.get("reward_after") is None:
        return not fell, f"score {falls}; a fall of at most {bound}"
    rise = e["reward_after"] - e["reward_before"]
    return rise <= 0 or not fell, f"reward {rise:+.3f}, score {falls}; a fall of at most {bound}"


def _regression(c: _Numbers, bound: float) -> tuple[bool, str]:
    found = [judge.keeps_up(0.5 - bound) for judge in c.judges()]
    text = f"over the champion {'; '.join(text for _, text in found)}; at least {0.5 - bound:g}"
    return all(holds for holds, _ in found), text


CHECKS: dict[str, Check] = {
    "min_win_rate": _win_rate,
    "max_kl": _kl,
    "max_length_ratio": _length,
    "max_judge_drop": _judge_drop,
}
"""Gate of the evaluation alone → what checks it."""
