"""Approvals of several people, each with a key of their own: two of three, where `promotion.approvals` asks for it.

Whoever holds the directory's key can promote alone, or write any name into a decision. An approval counts by the digest
of a person's key, which the lifecycle's config lists and the evaluation's signed statement keeps.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.envelope import (
    InTotoRecord,
    SignatureProblem,
    load_public,
    public_half,
    read_envelope,
    read_record,
    require_signers,
    sign,
)
from xray_runtime.kernel.evidence.kinds.approval import ApprovalGiven, LogApprovals
from xray_runtime.kernel.evidence.view import LogView
from xray_runtime.kernel.history.promotion_check import Gate
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.store.manifest import Sha256
from xray_runtime.methods.evaluate.config import PromotionConfig
from xray_runtime.trust.log import append


class Approval(BaseModel):
    """A person agrees that this checkpoint becomes champion of the registered model `name`."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    name: str
    checkpoint: Sha256
    by: str
    note: str
    at: datetime


class _Record(InTotoRecord[Approval]):
    predicate_type: Literal["urn:xray:approval:v1"] = Field(default="urn:xray:approval:v1", alias="predicateType")


def approve(output: Path, *, name: str, checkpoint: str, key: Path, by: str, note: str) -> str:
    """Log a person's approval; returns the digest of their key.

    Args:
        key: the person's private key, in PEM.

    Raises ConfigError: it cannot be used.
    """
    try:
        private = read_bounded(key)
        public = public_half(private)
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not an unencrypted elliptic-curve private key"
        raise ConfigError(f"--key: {str(key)!r} cannot be used: {reason}") from None
    now = datetime.now(UTC).replace(microsecond=0)
    approval = Approval(name=name, checkpoint=checkpoint, by=by, note=note, at=now)
    envelope = sign(_Record.of(approval, {name: checkpoint}), private).decode()
    append(output, ApprovalGiven(name=name, checkpoint=checkpoint, key=public.decode(), envelope=envelope))
    return load_public(public).keyid


def verified(given: ApprovalGiven) -> tuple[str, Approval]:
    """(digest of the key, what it signed). Raises ValueError: it does not count."""
    key, envelope = load_public(given.key.encode()), read_envelope(given.envelope.encode())
    require_signers(envelope, [key])
    approval = read_record(envelope, _Record).predicate
    if (approval.name, approval.checkpoint) != (given.name, given.checkpoint):
        raise SignatureProblem("invalid", "it approves another candidate")
    return key.keyid, approval


def check_approvals(log: LogView, name: str, checkpoint: str, gates: PromotionConfig) -> Gate:
    """Whether enough of the people whose keys are listed approved a candidate: the gate `approvals`."""
    needed, approvers = gates.approvals or 0, set(gates.approvers)
    people: dict[str, str] = {}
    for given in log.state(LogApprovals).given:
        if (given.name, given.checkpoint) == (name, checkpoint):
            try:
                key, approval = verified(given)
            except ValueError:
                # An audit names it.
                continue
            if key in approvers:
                people[key] = f"{approval.by} ({key[:12]})"
    listed = ", ".join(people.values()) or "nobody"
    reason = f"approved by {listed}; {needed} of {len(approvers)} people must"
    return Gate(name="approvals", passed=len(people) >= needed, reason=reason)
