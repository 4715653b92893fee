"""Entries about withdrawals."""

from __future__ import annotations

from typing import Literal

from xray_runtime.kernel.evidence.view import Line, LogView, SignedEntry
from xray_runtime.kernel.store.manifest import Sha256


class Withdrawals(list["Withdrawn"]):
    """In order."""


class Withdrawn(SignedEntry):
    """A person's data, or a source, was withdrawn: what holds it, what was made from it, and what was erased."""

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
        view.files = {name: sha for name, sha in view.files.items() if name not in view.erased}


KINDS = (Withdrawn,)
