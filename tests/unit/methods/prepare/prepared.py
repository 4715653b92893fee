"""Stage prepare, run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xray_runtime.cluster.stage import Stage
from xray_runtime.data.pairs import Example, Pairs
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.graph.kind import NoInputs
from xray_runtime.methods.prepare.body import run
from xray_runtime.methods.prepare.config import DataConfig


class Notes:
    """A recorder that keeps what it is told."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.reports: list[tuple[int, int]] = []
        self.tables: dict[str, list[list[Any]]] = {}

    def progress(self, done: int, total: int, unit: str, note: str = "") -> None:
        self.reports.append((done, total))

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        assert step == 0
        assert all(isinstance(value, float) for value in values.values())

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        assert all(len(row) == len(columns) for row in rows)
        self.tables[name] = rows

    def figure(self, name: str, figure: Any) -> None:
        raise AssertionError("prepare draws nothing")

    def resume(self) -> None:
        raise AssertionError("prepare makes no snapshots")

    def refuse_snapshot(self, problem: str) -> None:
        raise AssertionError("prepare makes no snapshots")

    def snapshot_due(self, step: int) -> bool:
        raise AssertionError("prepare makes no snapshots")

    def write_snapshot(self, step: int, state: dict[str, Any], save: Callable[[Path], None]) -> None:
        raise AssertionError("prepare makes no snapshots")


def no_models(specs: Mapping[str, Any]) -> Any:
    raise AssertionError("prepare opens no models")


def prepare(out: Path, seed: int = 0, **config: Any) -> tuple[list[Example], list[Example], dict[str, int], Notes]:
    """(train, held-out rows, counts, recorder) of a run with these fields of `DataConfig`."""
    out.mkdir()
    stage = Stage("prepare", seed, DataConfig(**config), NoInputs(), RuntimeConfig(), no_models)
    notes = Notes(out)
    assert run(stage, out, notes) == 0
    stats = json.loads((out / "stats.json").read_text())
    train, heldout = (list(Pairs(out / f"{side}.arrow", Example)) for side in ("train", "heldout"))
    return train, heldout, stats, notes
