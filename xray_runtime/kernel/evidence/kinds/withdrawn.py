"""Entries about withdrawals."""

from __future__ import annotations

from typing import ClassVar, Literal

from xray_runtime.kernel.evidence.view import FoldsInto, Line, LogView, SignedEntry
from xray_runtime.kernel.store.manifest import Sha256


class Withdrawals(list["Withdrawn"]):
    """In order."""


class Withdrawn(SignedEntry):
    """A person's data, or a source, was withdrawn: what holds it, what was made from it, and what was erased."""

    folds_into: ClassVar[FoldsInto] = "states"
    action: Literal["withdraw"] = "withdraw"
    subject: str
    """`user PSEUDONYM`, or `source KIND:DIGEST`."""
    by: str
    holders: list[Sha256]
    """Checkpoints that hold it."""
    descendants: list[Sha256]
    """Checkpoints that were made from them."""
    erased: list[str]
    """Paths below the output directory of the files that are gone since."""

    def fold(self, view: LogView, line: Line) -> None:
        view.state(Withdrawals).append(self)
        view.erased |= set(self.erased)
        for name in self.erased:
            view.files.pop(name, None)


KINDS = (Withdrawn,)
