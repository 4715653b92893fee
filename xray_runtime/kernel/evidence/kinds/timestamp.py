"""Entries about when the log was what it is, as an authority says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field

from xray_runtime.kernel.evidence.view import FoldsInto, Line, LogView, SignedEntry


class Stamp(NamedTuple):
    """A timestamp and what it is of."""

    token: str
    certificate: str
    size: int
    """Entries before it: those of the checkpoint that was stamped."""
    decisions: int
    """Decisions among them."""


@dataclass
class LogTimestamps:
    """The timestamps in the log."""

    chosen: AuthorityChosen | None = None
    unstamped: int = 0
    """Decisions before the first authority was named."""
    stamps: tuple[Stamp, ...] = ()


class AuthorityChosen(SignedEntry):
    """From here on an authority stamps the log after each decision."""

    folds_into: ClassVar[FoldsInto] = "states"
    action: Literal["authority"] = "authority"
    address: str
    certificate: str
    """Its root certificate, in PEM."""
    by: str

    def fold(self, view: LogView, line: Line) -> None:
        state = view.state(LogTimestamps)
        if state.chosen is None:
            state.unstamped = len(view.decisions)
        state.chosen = self


class Stamped(SignedEntry):
    """The authority stamped the checkpoint of all entries before this one."""

    folds_into: ClassVar[FoldsInto] = "states"
    action: Literal["stamp"] = "stamp"
    token: str = Field(max_length=2**16)
    """RFC 3161 response in DER, base64."""

    def fold(self, view: LogView, line: Line) -> None:
        state = view.state(LogTimestamps)
        certificate = state.chosen.certificate if state.chosen is not None else ""
        # The view has this line already.
        state.stamps += (Stamp(self.token, certificate, len(view.heads) - 1, len(view.decisions)),)


KINDS = (AuthorityChosen, Stamped)
