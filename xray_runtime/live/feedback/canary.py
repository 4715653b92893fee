"""A canary's two models, compared by what was recorded of them.

Only randomly assigned requests count. Each person counts once for each model, by the first feedback (thumb or
score) and the first answer, so a flood by one user is one observation. Both are compared by confidence sequences, which
stay valid however often they are checked; together they roll back a candidate that is not worse with probability at
most ALPHA.
Segments are read in order and the first decisive one counts, so a repeated comparison gives the same result.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from xray_runtime.algorithms.confidence_sequence import ConfidenceSequence
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.kinds.canary import ArmResult, Canaries, Canary, CanaryEnded, Outcome
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.kernel.history.recorded_rows import KEYS, RECORDED, UserKeys, about, read_segment, segment_name
from xray_runtime.kernel.history.reference import LineageStore, open_lineage_store
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.live.canary import end
from xray_runtime.live.feedback.collection import signals_of, sound_chain
from xray_runtime.live.withdrawal import refusal

ALPHA = 0.05
NUM_INTERVALS = 4
"""Feedback and errors, of two models: each interval gets an equal part of ALPHA."""
RETRY_SECONDS = 1.0
Side = Literal["candidate", "champion"]
THUMBS = {"up": 1.0, "down": 0.0}


class Arm:
    """The observations of one model."""

    def __init__(self) -> None:
        self.feedback = ConfidenceSequence(ALPHA / NUM_INTERVALS)
        self.errors = ConfidenceSequence(ALPHA / NUM_INTERVALS)
        self._users = set[str]()
        self._judges = set[str]()
        self._latencies = list[float]()

    def add_answer(self, user: str, complete: bool, latency_s: float) -> None:
        self._latencies.append(latency_s)
        if user not in self._users:
            self._users.add(user)
            self.errors.add(float(not complete))

    def add_feedback(self, judge: str, asker: str, value: float) -> None:
        # A judge of many answers counts once, and so do many judges of one person's answers.
        if not {judge, asker} & self._judges:
            self.feedback.add(value)
        self._judges |= {judge, asker}

    def result(self) -> ArmResult:
        return ArmResult(
            answers=len(self._latencies),
            judges=self.feedback.count,
            feedback=self.feedback.mean,
            feedback_low=self.feedback.low,
            feedback_high=self.feedback.high,
            users=self.errors.count,
            errors=self.errors.mean,
            errors_low=self.errors.low,
            errors_high=self.errors.high,
            latency_s=statistics.median(self._latencies) if self._latencies else None,
        )


class ArmComparison:
    """Candidate and champion of one canary."""

    def __init__(self, canary: Canary) -> None:
        self._canary = canary
        self.arms: dict[Side, Arm] = {"candidate": Arm(), "champion": Arm()}
        self._sides: dict[str, Side] = {canary.began.candidate: "candidate", canary.began.champion: "champion"}
        self._askers: dict[str, str] = {}
        """Id of an answer that counts → who was answered."""

    def add(self, row: Mapping[str, Any], keys: UserKeys) -> None:
        """Take a recorded row."""
        side = self._sides.get(row["model"])
        if side is None:
            return
        if row["kind"] == "answer":
            if row.get("canary") == self._canary.began.candidate:
                self._askers[row["id"]] = row["user"]
                self.arms[side].add_answer(row["user"], row["complete"], row["latency_s"])
            return
        asker = self._askers.get(row["answer"])
        if asker is None:
            return
        texts = keys.decrypt(row["user"], row["texts"], about(row["kind"], row["id"], row["model"]))
        signals = signals_of(row, texts) or {}
        value = signals.get("score", THUMBS.get(signals.get("thumb", "")))
        if value is not None:
            self.arms[side].add_feedback(row["user"], asker, float(value))

    def outcome(self) -> tuple[Outcome, str] | None:
        """(how the canary ends, why); None: it goes on."""
        rules = self._canary.began.rules
        candidate, champion = self.arms["candidate"], self.arms["champion"]
        if candidate.errors.low > champion.errors.high:
            rates = f"{candidate.errors.low:.3f} or more of its users, {champion.errors.high:.3f} or fewer of"
            return "rolled back", f"it fails {rates} the champion's"
        allowed = f"beside the champion's; allowed: {-rules.max_loss:+g}"
        best = candidate.feedback.high - champion.feedback.low
        if best < -rules.max_loss:
            return "rolled back", f"its feedback is at best {best:+.3f} {allowed}"
        worst = candidate.feedback.low - champion.feedback.high
        enough = min(candidate.feedback.count, champion.feedback.count) >= rules.min_feedback
        if enough and worst >= -rules.max_loss:
            return "passed", f"its feedback is at worst {worst:+.3f} {allowed}"
        return None


class Monitor:
    """Reads what is recorded while a canary runs; one that is made anew decides the same.

    Args:
        public: the public key to trust; by default the output directory's.
    """

    def __init__(self, store: LineageStore, canary: Canary, public: Path | None = None) -> None:
        self._output, self._tracking_uri, self._public = store.output, store.tracking_uri, public
        self.canary = canary
        self.through = canary.began.first - 1
        self.comparison = ArmComparison(canary)
        self._deadline = datetime.fromisoformat(canary.began.at) + timedelta(hours=canary.began.rules.max_hours)
        self._keys = UserKeys(self._output / RECORDED / KEYS, writable=False)

    def check(self, now: datetime | None = None) -> CanaryEnded | None:
        """The canary's end as the records have it, in the log or due now; None: it goes on.

        Records that are missing, or that cannot be verified, end it.
        """
        now = now or datetime.now(UTC)
        try:
            # A segment may expire during the check; the second attempt knows that it has expired.
            try:
                return self._check(now)
            except ConfigError:
                time.sleep(RETRY_SECONDS)
                return self._check(now)
        # Records that cannot be read cannot be verified.
        except (OSError, ValueError, KeyError, TypeError) as error:
            return self.decision("rolled back", f"its record cannot be verified ({first_line(error)})")

    def _check(self, now: datetime) -> CanaryEnded | None:
        began = self.canary.began
        known = evidence().sound_view(self._output, self._public).state(Canaries).get(self.canary.id)
        if known is None:
            return self.decision("rolled back", "its beginning is not in the signed log")
        if known.ended is not None:
            return known.ended
        store = open_lineage_store(self._output, self._tracking_uri)
        for sha256 in (began.candidate, began.champion):
            node = store.graph.nodes.get(sha256)
            reason = f"{sha256[:12]} is not in the store" if node is None else refusal(store, node)
            if reason is not None:
                return self.decision("rolled back", reason)
        chain = sound_chain(store, hashing=False)
        if chain.last < self.through or any(n not in chain.segments for n in range(began.first, chain.last + 1)):
            return self.decision("rolled back", "recorded segments are missing")
        for number in range(self.through + 1, chain.last + 1):
            if chain.made[number] > self._deadline:
                break
            path = self._output / RECORDED / segment_name(number)
            if file_sha256(path) != chain.segments[number]:
                raise ValueError(f"{RECORDED}/{path.name}: its bytes were changed")
            for row in read_segment(path):
                self.comparison.add(row, self._keys)
            self.through = number
            if (outcome := self.comparison.outcome()) is not None:
                return self.decision(*outcome)
        if now <= self._deadline:
            return None
        return self.decision("undecided", f"{began.rules.max_hours:g} hours were not enough")

    def decision(self, outcome: Outcome, reason: str) -> CanaryEnded:
        """An end, with what was measured so far."""
        arms = {side: arm.result() for side, arm in self.comparison.arms.items()}
        return CanaryEnded(canary=self.canary.id, outcome=outcome, reason=reason, through=self.through, arms=arms)


def decide(store: LineageStore, canary: Canary) -> CanaryEnded | None:
    """The end of a canary, which is written if it is due; None: it goes on."""
    if canary.ended is not None:
        return canary.ended
    decision = Monitor(store, canary).check()
    return end(store.output, decision) if decision is not None else None
