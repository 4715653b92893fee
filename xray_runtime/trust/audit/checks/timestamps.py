"""The timestamps in the log against its entries."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from xray_runtime.kernel.evidence.kinds.timestamp import LogTimestamps
from xray_runtime.kernel.evidence.kinds.witness import LogWitness
from xray_runtime.kernel.evidence.log import LOG
from xray_runtime.kernel.history.audit_check import ASK, AuditCheck, Audited, Finding, Meaning
from xray_runtime.trust.log import origin
from xray_runtime.trust.merkle import MerkleTree
from xray_runtime.trust.note import LogCheckpoint
from xray_runtime.trust.timestamp import TimestampProblem, stamped_at

CODES = {
    "timestamp-invalid": Meaning("A timestamp in the log is not one of its authority for these entries.", ASK),
    "timestamp-contradicts": Meaning("The log dates a decision to another time than its timestamps allow.", ASK),
    "timestamp-missing": Meaning(
        "The log names an authority, and it did not stamp the newest decisions.",
        "See that the authority answers: the next decision is stamped with those before it.",
    ),
    "authority-named": Meaning(
        "The log names this timestamp authority. Its stamps count from there on.",
        "Where you must believe times, compare its certificate with the one that the authority publishes.",
        is_note=True,
    ),
    "authority-replaced": Meaning(
        "The log names another timestamp authority than before, which the holder of its key can do.",
        "Ask its owner why, and compare the certificate: decisions since then are dated by this authority alone.",
        is_note=True,
    ),
}
CLOCKS_S = timedelta(seconds=300)
"""How far the clocks of the authority and of this machine may differ."""


def _check(audited: Audited) -> Iterator[Finding]:
    log, state = audited.log, audited.log.state(LogTimestamps)
    if state.chosen is None or not audited.is_log_sound:
        return
    yield from _named(state, log.state(LogWitness).since)
    tree = MerkleTree(map(bytes.fromhex, log.heads))
    checked, before = state.unstamped, datetime.min.replace(tzinfo=UTC) + CLOCKS_S
    for stamp in state.stamps:
        subject = f"{LOG}, entry {stamp.size + 1}"
        try:
            checkpoint = LogCheckpoint(origin(log.heads), stamp.size, tree.root(stamp.size))
            now = stamped_at(stamp.token, stamp.certificate, checkpoint)
        except TimestampProblem as problem:
            yield Finding(subject, "timestamp-invalid", str(problem))
            continue
        for decision in log.decisions[checked : stamp.decisions]:
            if not _is_between(before - CLOCKS_S, decision.at, now + CLOCKS_S):
                between = f"{before:%Y-%m-%d %H:%M:%S} and {now:%Y-%m-%d %H:%M:%S} UTC"
                detail = f"the decision to {decision.action} says {decision.at}, and the authority: between {between}"
                yield Finding(subject, "timestamp-contradicts", detail)
        checked, before = stamp.decisions, now
    if checked < len(log.decisions):
        missing = len(log.decisions) - checked
        yield Finding(LOG, "timestamp-missing", f"{missing} decisions (authority {state.chosen.address})")


def _named(state: LogTimestamps, witness_since: int) -> Iterator[Finding]:
    """Every authority that the log ever named, and when."""
    before = None
    for number, entry in state.named:
        digest = hashlib.sha256(entry.certificate.encode()).hexdigest()
        code = "authority-named" if before in (None, digest) else "authority-replaced"
        detail = f"{entry.address}, by {entry.by}, {entry.at}; sha256 of its root certificate {digest[:16]}"
        if code == "authority-replaced" and not 0 < witness_since < number:
            detail += "; no witness saw it"
        yield Finding(f"{LOG}, entry {number}", code, detail)
        before = digest


def _is_between(first: datetime, at: str, last: datetime) -> bool:
    try:
        return first <= datetime.fromisoformat(at) <= last
    # No time, or one without a zone.
    except (TypeError, ValueError):
        return False


CHECK = AuditCheck("timestamps of the log by its authority", CODES, _check)
