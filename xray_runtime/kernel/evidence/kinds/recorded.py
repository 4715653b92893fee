"""Entries about recorded answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from xray_runtime.kernel.evidence.view import EMPTY, FoldsInto, Head, Line, LogView, SignedEntry
from xray_runtime.kernel.store.manifest import Sha256


@dataclass
class RecordedEnd:
    """Where the chain of recorded answers ended."""

    head: Head = EMPTY
    """The chain must still have this line."""


class Recorded(SignedEntry):
    """The end of the chain of recorded answers, as it was then; see `recorded`."""

    folds_into: ClassVar[FoldsInto] = "states"
    action: Literal["record"] = "record"
    entries: int
    head: Sha256

    def fold(self, view: LogView, line: Line) -> None:
        view.state(RecordedEnd).head = Head(self.entries, self.head)


KINDS = (Recorded,)
