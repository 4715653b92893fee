"""The recorded answers that feedback may be about, and the feedback that is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xray_runtime.kernel.history.recorded import ChainView
from xray_runtime.kernel.history.recorded_rows import RECORDED, RecordedRow, read_segment, segment_name

MAX_ANSWERS = 200_000
"""Feedback is taken about this number of last answers."""
COLUMNS = ["kind", "id", "answer", "user", "application", "model"]


@dataclass
class RecordedAnswer:
    """The facts about a recorded answer that its feedback is checked against."""

    user: str
    """Pseudonym."""
    application: str
    model: str
    num_feedback: int = 0


class RecordedIndex:
    """The last answers and feedback of a store, by id."""

    def __init__(self) -> None:
        self.answers: dict[str, RecordedAnswer] = {}
        self._feedback: set[str] = set()

    @classmethod
    def read(cls, output: Path, chain: ChainView) -> RecordedIndex:
        """The index of everything on disk. Raises ValueError if a segment is damaged."""
        index = cls()
        for number in chain.segments:
            index.add(read_segment(output / RECORDED / segment_name(number), COLUMNS))
        return index

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows, each with COLUMNS."""
        for row in rows:
            if row["kind"] == "answer":
                self.answers[row["id"]] = RecordedAnswer(row["user"], row["application"], row["model"])
                if len(self.answers) > MAX_ANSWERS:
                    del self.answers[next(iter(self.answers))]
                continue
            self._feedback.add(row["id"])
            if row["answer"] in self.answers:
                self.answers[row["answer"]].num_feedback += 1

    def add_row(self, row: RecordedRow) -> None:
        """As `add`, for a row that is not on disk yet."""
        self.add([{name: getattr(row, name) for name in COLUMNS}])

    def __contains__(self, id: str) -> bool:
        return id in self.answers or id in self._feedback
