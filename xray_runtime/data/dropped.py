"""What a stage left out of its data: counted by reason, and written beside what it made, by row of the source."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

FILE = "dropped.jsonl"
MOST = 1000
"""Rows listed of each reason; the others are counted in the file's last lines."""


class DroppedRows:
    """Writes `FILE`: a JSON object a row, with the reason and where the row stands. To be used in a `with` block."""

    def __init__(self, directory: Path) -> None:
        self.counts: Counter[str] = Counter()
        self._file = (directory / FILE).open("w", encoding="utf-8")

    def add(self, reason: str, place: Mapping[str, int | str]) -> None:
        """One more, by its place in the source."""
        self.counts[reason] += 1
        if self.counts[reason] <= MOST:
            self._file.write(json.dumps({"reason": reason, **place}) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reason, count in sorted(self.counts.items()):
            if count > MOST:
                self._file.write(json.dumps({"reason": reason, "more": count - MOST}) + "\n")
        self._file.close()
