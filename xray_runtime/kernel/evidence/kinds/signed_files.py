"""Entries about directories of signed files."""

from __future__ import annotations

from typing import ClassVar, Literal

from xray_runtime.kernel.evidence.view import FoldsInto, Line, LogView, SignedEntry
from xray_runtime.kernel.store.manifest import Sha256


class SignedDirectories(dict[str, "FilesSigned"]):
    """Directory below the output directory → the last state of its signed files that the log knows."""


class FilesSigned(SignedEntry):
    """The signed files of a directory were changed this often; see `signed_files`."""

    folds_into: ClassVar[FoldsInto] = "states"
    action: Literal["sign"] = "sign"
    directory: str
    """Below the output directory."""
    changes: int
    statement: Sha256

    def fold(self, view: LogView, line: Line) -> None:
        known = view.state(SignedDirectories).get(self.directory)
        # Two processes may log two changes in the other order.
        if known is None or known.changes < self.changes:
            view.state(SignedDirectories)[self.directory] = self


KINDS = (FilesSigned,)
