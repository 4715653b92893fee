"""Entries about nights of the nightly flow."""

from __future__ import annotations

from typing import Any, Literal

from xray_runtime.evidence.view import Line, LogView, SignedEntry


class Nights(dict[int, "NightWritten"]):
    """Number → the record of a night."""


class NightWritten(SignedEntry):
    """The record of a night of the nightly flow, as it is from here on; the line's subject is its file."""

    action: Literal["night"] = "night"
    number: int
    night: dict[str, Any]

    def fold(self, view: LogView, line: Line) -> None:
        view.state(Nights)[self.number] = self


KINDS = (NightWritten,)
