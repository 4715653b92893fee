"""Entries about people's approvals of a candidate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from xray_runtime.kernel.evidence.view import FoldsInto, Line, LogView, SignedEntry
from xray_runtime.kernel.store.manifest import Sha256


@dataclass
class LogApprovals:
    """The approvals in the log."""

    given: tuple[ApprovalGiven, ...] = ()


class ApprovalGiven(SignedEntry):
    """A person approved a candidate, with a key of their own."""

    names_files: ClassVar[bool] = False
    folds_into: ClassVar[FoldsInto] = "states"
    action: Literal["approve"] = "approve"
    name: str
    """Registered model."""
    checkpoint: Sha256
    key: str
    """The person's public key, in PEM."""
    envelope: str
    """A signed `trust.approvals.Approval`."""

    def fold(self, view: LogView, line: Line) -> None:
        view.state(LogApprovals).given += (self,)


KINDS = (ApprovalGiven,)
