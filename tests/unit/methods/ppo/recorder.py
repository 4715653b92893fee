"""A recorder that keeps what a stage reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xray_runtime.kernel.graph.kind import Answer
from xray_runtime.kernel.store.snapshots import Snapshot


class FakeRecorder:
    """Keeps what is reported; makes a snapshot after each step."""

    def __init__(self, directory: Path, newest: Snapshot | None = None) -> None:
        self.log_dir, self._newest = directory, newest
        self.points: list[dict[str, float]] = []
        self.snapshots: list[Snapshot] = []
        self.answers: list[Answer] = []
        """To the questions that come, in order."""
        self.questions: list[str] = []
        self.tables: dict[str, tuple[list[str], list[list[Any]]]] = {}
        self.reports: list[tuple[int, int]] = []

    @property
    def values(self) -> dict[str, float]:
        """The last value of each metric."""
        return {name: value for point in self.points for name, value in point.items()}

    def progress(self, done: int, total: int, unit: str, note: str = "") -> None:
        self.reports.append((done, total))

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self.points.append(dict(values))

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        self.tables[name] = columns, rows

    def figure(self, name: str, figure: Any) -> None: ...

    def ask(self, question: str) -> Answer | None:
        self.questions.append(question)
        return self.answers.pop(0) if self.answers else None

    def resume(self) -> Snapshot | None:
        return self._newest

    def refuse_snapshot(self, problem: str) -> None: ...

    def snapshot_due(self, step: int) -> bool:
        return True

    def write_snapshot(self, step: int, state: dict[str, Any], save: Callable[[Path], None]) -> None:
        directory = self.log_dir / str(step)
        directory.mkdir()
        save(directory)
        self.snapshots.append(Snapshot(directory, step, json.loads(json.dumps(state))))
