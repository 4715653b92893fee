"""Approvals of several people, each with a key of their own: two of three, where `promotion.approvals` asks for it.

Whoever holds the directory's key can promote alone, or write any name into a decision. An approval counts by the digest
of a person's key, which the lifecycle's config lists and the evaluation's signed statement keeps. What a person signed
last counts, by the time in it: whoever holds the directory's key cannot log a withdrawn approval again. A person signs
the end of the log too, so that what was said in another directory, or in a copy of this one, does not count here.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.envelope import (
    InTotoRecord,
    SignatureProblem,
    load_public,
    read_envelope,
    read_record,
    require_signers,
    sign,
)
from xray_runtime.kernel.evidence.kinds.approval import ApprovalGiven, LogApprovals
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.evidence.view import Head, LogView
from xray_runtime.kernel.history.promotion_check import Gate
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.store.manifest import Sha256
from xray_runtime.methods.evaluate.config import PromotionConfig
from xray_runtime.trust.log import append
from xray_runtime.trust.signing import public_bytes, require_agent


class Approval(BaseModel):
    """A person agrees that this checkpoint becomes champion of the registered model `name`, or no longer does."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    name: str
    checkpoint: Sha256
    head: str
    """The end of the log that it is for, as `view.Head` writes it."""
    by: str
    note: str
    at: datetime
    withdrawn: bool = False


class _ApprovalRecord(InTotoRecord[Approval]):
    predicate_type: Literal["urn:xray:approval:v1"] = Field(default="urn:xray:approval:v1", alias="predicateType")


def approve(output: Path, *, name: str, checkpoint: str, key: Path, by: str, note: str, withdrawn: bool = False) -> str:
    """Log a person's approval, or that it is `withdrawn`; returns the digest of their key.

    Args:
        key: the person's key, as `XRAY_SIGNING_KEY` names one.

    Raises ConfigError: it cannot be used, or has no approval to withdraw.
    """
    public = public_bytes(key, "--key")
    require_agent(key)
    digest, now = load_public(public).keyid, datetime.now(UTC)
    log = view(output)
    last = _last_words(log, name, checkpoint).get(digest)
    if withdrawn and (last is None or last.withdrawn):
        raise ConfigError(f"--withdraw: this key has not approved {checkpoint[:12]} as champion of {name!r}")
    # This counts from now on, even if the clock was set back.
    at = now if last is None else max(now, last.at + timedelta(microseconds=1))
    approval = Approval(
        name=name, checkpoint=checkpoint, head=str(log.head), by=by, note=note, at=at, withdrawn=withdrawn
    )
    envelope = sign(_ApprovalRecord.of(approval, {name: checkpoint}), read_bounded(key)).decode()
    action: Any = "approve-end" if withdrawn else "approve"
    entry = ApprovalGiven(action=action, name=name, checkpoint=checkpoint, key=public.decode(), envelope=envelope)
    append(output, entry)
    return digest


def verified(given: ApprovalGiven, log: LogView) -> tuple[str, Approval]:
    """(digest of the key, what it signed) of an entry of `log`. Raises ValueError: it does not count."""
    key, envelope = load_public(given.key.encode()), read_envelope(given.envelope.encode())
    require_signers(envelope, [key])
    approval = read_record(envelope, _ApprovalRecord).predicate
    if (approval.name, approval.checkpoint) != (given.name, given.checkpoint):
        raise SignatureProblem("invalid", "it approves another candidate")
    if approval.withdrawn != (given.action == "approve-end") or approval.at.tzinfo is None:
        raise SignatureProblem("invalid", "it was signed for another action, or has no time")
    head = Head.parse(approval.head)
    if head.entries == 0 or log.lacks(head):
        raise SignatureProblem("foreign", "it was given for another log")
    return key.keyid, approval


def _last_words(log: LogView, name: str, checkpoint: str) -> dict[str, Approval]:
    """Digest of a key → what it signed last about a candidate."""
    last: dict[str, Approval] = {}
    for given in log.state(LogApprovals).given:
        if (given.name, given.checkpoint) == (name, checkpoint):
            # An audit names one that does not count.
            with contextlib.suppress(ValueError):
                key, approval = verified(given, log)
                if key not in last or _order(approval) > _order(last[key]):
                    last[key] = approval
    return last


def _order(approval: Approval) -> tuple[datetime, bool]:
    """A withdrawal counts before an approval of the same time."""
    return approval.at, approval.withdrawn


def check_approvals(log: LogView, name: str, checkpoint: str, gates: PromotionConfig) -> Gate:
    """Whether enough of the people whose keys are listed approved a candidate: the gate `approvals`."""
    needed, allowed = gates.approvals or 0, set(gates.approvers)
    last = _last_words(log, name, checkpoint).items()
    people = [f"{one.by} ({key[:12]})" for key, one in last if key in allowed and not one.withdrawn]
    reason = f"approved by {', '.join(people) or 'nobody'}; {needed} of {len(allowed)} people must"
    return Gate(name="approvals", passed=len(people) >= needed, reason=reason)
