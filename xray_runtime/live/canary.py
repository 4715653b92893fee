"""Canaries in the signed log: at most one for each registered model runs; its end is a signed decision."""

from __future__ import annotations

import getpass
from pathlib import Path

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.kinds.canary import Canaries, Canary, CanaryBegan, CanaryConfig, CanaryEnded
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.evidence.view import LogView, lock
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.kernel.history.promotion_check import Gate


def running(log: LogView, name: str) -> Canary | None:
    """The canary of the registered model `name` that has not ended."""
    return next((c for c in log.state(Canaries).values() if c.ended is None and c.began.name == name), None)


def canary_of(log: LogView, candidate: str) -> Canary | None:
    """The last canary of a candidate."""
    return next((c for c in reversed(log.state(Canaries).values()) if c.began.candidate == candidate), None)


def begin(output: Path, name: str, candidate: str, champion: str, first: int, rules: CanaryConfig) -> Canary:
    """Begin a canary, unless this candidate has had one beside this champion, which is returned.

    The arguments are fields of a `CanaryBegan`. Raises ConfigError where another candidate's canary runs.
    """
    with lock(output, "log"):
        log = view(output)
        known = canary_of(log, candidate)
        if known is not None and known.began.champion == champion:
            return known
        other = running(log, name)
        if other is not None:
            raise ConfigError(f"canary: {candidate[:12]} must wait: the canary of {other.began.candidate[:12]} runs")
        entry = CanaryBegan(
            name=name, candidate=candidate, champion=champion, first=first, rules=rules, by=getpass.getuser()
        )
        evidence().append(output, entry, locked=True)
        canary = canary_of(view(output), candidate)
    assert canary is not None
    return canary


def end(output: Path, decision: CanaryEnded) -> CanaryEnded:
    """Write the end of a canary, unless it has one; returns the one that counts."""
    with lock(output, "log"):
        known = view(output).state(Canaries).get(decision.canary)
        if known is not None and known.ended is not None:
            return known.ended
        evidence().append(output, decision, locked=True)
    return decision


def summary(canary: Canary) -> str:
    """A canary as one line."""
    began, ended = canary.began, canary.ended
    if ended is None:
        limit = f"at most {began.rules.max_hours:g} hours"
        return f"running since {began.at[:19]} on {began.rules.share:.0%} of users ({limit}): not decided yet"
    sides = [
        f"{side}: {arm.answers} answers, feedback {_number(arm.feedback)} [{arm.feedback_low:.3f}, "
        f"{arm.feedback_high:.3f}] of {arm.judges}, errors {_number(arm.errors)} of {arm.users}"
        for side, arm in ended.arms.items()
    ]
    return "; ".join([f"{ended.outcome}: {ended.reason}", *sides])


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def gate(output: Path, candidate: str, champion: str, public: Path | None) -> Gate | None:
    """The gate `canary`: whether the candidate passed its canary beside the champion; None if it had none."""
    try:
        log = evidence().sound_view(output, public)
    except (OSError, ValueError) as error:
        return Gate(name="canary", passed=False, reason=f"the canary cannot be verified ({error})")
    canary = canary_of(log, candidate)
    if canary is None or canary.began.champion != champion:
        return None
    passed = canary.ended is not None and canary.ended.outcome == "passed"
    return Gate(name="canary", passed=passed, reason=f"canary {summary(canary)}")
