"""Entries about the log's witness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from xray_runtime.kernel.evidence.view import FoldsInto, Line, LogView, SignedEntry


@dataclass
class LogWitness:
    """The witness that the log knows."""

    chosen: WitnessChosen | None = None


class WitnessChosen(SignedEntry):
    """From here on a witness cosigns the log's checkpoints."""

    folds_into: ClassVar[FoldsInto] = "states"
    action: Literal["witness"] = "witness"
    address: str
    """A directory, or a server's address."""
    key: str
    """Its public key: NAME+HASH+KEY."""
    by: str

    def fold(self, view: LogView, line: Line) -> None:
        view.state(LogWitness).chosen = self


KINDS = (WitnessChosen,)
