"""Where a stage's reports go: files under the output directory, the stage's MLflow run, whoever watches progress."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from xray_runtime.lineage.tracking import StageRun

OnProgress = Callable[[str, int, int, str, str], None]
"""(stage, done, total, unit, note)."""

PROGRESS_SECONDS = 0.2


def records_directory(output: Path, stage: str, key: str) -> Path:
    """Where the records of a stage lie: metrics.jsonl, tables, figures. Nothing in there enters a checkpoint."""
    return output / "records" / f"{stage}-{key[:12]}"


class StageRecorder:
    """The `Recorder` of a real stage. Each attempt starts its records anew."""

    def __init__(self, output: Path, stage: str, key: str, run: StageRun | None, on_progress: OnProgress) -> None:
        self.log_dir = output / "logs" / stage
        self._stage, self._run, self._on_progress = stage, run, on_progress
        self._directory = records_directory(output, stage, key)
        self._directory.mkdir(parents=True, exist_ok=True)
        self.metrics_path = self._directory / "metrics.jsonl"
        self._metrics = self.metrics_path.open("w", encoding="utf-8")
        self._reported = 0.0

    def progress(self, done: int, total: int, unit: str, note: str = "") -> None:
        if time.monotonic() - self._reported >= PROGRESS_SECONDS or done == total:
            self._reported = time.monotonic()
            self._on_progress(self._stage, done, total, unit, note)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self._metrics.write(json.dumps({"step": step, "metrics": {k: float(v) for k, v in values.items()}}) + "\n")
        self._metrics.flush()
        if self._run is not None:
            self._run.metrics(values, step)

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        text = json.dumps({"columns": columns, "rows": rows}, ensure_ascii=False, indent=1)
        (self._directory / f"{name}.json").write_text(text, encoding="utf-8")
        if self._run is not None:
            self._run.table(name, columns, rows)

    def figure(self, name: str, figure: Figure) -> None:
        figure.savefig(self._directory / f"{name}.png", dpi=120)
        if self._run is not None:
            self._run.figure(name, figure)

    def close(self) -> None:
        self._metrics.close()
