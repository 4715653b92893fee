"""Data that a stage dropped: counted by reason, and written beside its output, by row of the source."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

FILE = "dropped.jsonl"
MOST = 1000
"""Maximum number of rows listed per reason; the file's last lines count the others."""


class DroppedRows(AbstractContextManager["DroppedRows"]):
    """Writes `FILE`: one JSON object per row, with the reason and the row's position. Use it in a `with` block."""

    def __init__(self, directory: Path) -> None:
        self.counts: Counter[str] = Counter()
        self._file = (directory / FILE).open("w", encoding="utf-8")

    def add(self, reason: str, position: Mapping[str, int | str]) -> None:
        """Add a row by its position in the source."""
        self.counts[reason] += 1
        if self.counts[reason] <= MOST:
            self._file.write(json.dumps({"reason": reason, **position}) + "\n")

    def __exit__(self, *error: object) -> None:
        for reason, count in sorted(self.counts.items()):
            if count > MOST:
                self._file.write(json.dumps({"reason": reason, "more": count - MOST}) + "\n")
        self._file.close()
