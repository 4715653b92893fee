"""Entries about cycles of the flywheel."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from xray_runtime.kernel.evidence.view import FoldsInto, Line, LogView, SignedEntry


class Cycles(dict[int, "CycleWritten"]):
    """Number → the record of a cycle."""


class CycleWritten(SignedEntry):
    """The record of a cycle of the flywheel from here on; the line's subject is its file."""

    folds_into: ClassVar[FoldsInto] = "states"
    action: Literal["cycle"] = "cycle"
    number: int
    cycle: dict[str, Any]

    def fold(self, view: LogView, line: Line) -> None:
        view.state(Cycles)[self.number] = self


KINDS = (CycleWritten,)
