"""Nightly flows and stages without models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xray_runtime.cluster.stage import Stage
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.live.flywheel import FlywheelConfig


class Quiet:
    """A recorder that only keeps tables."""

    def __init__(self) -> None:
        self.tables: dict[str, list[list[Any]]] = {}

    def progress(self, *_: Any) -> None: ...

    def metrics(self, *_: Any, **__: Any) -> None: ...

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        assert all(len(row) == len(columns) for row in rows)
        self.tables[name] = rows


def no_models(specs: Any) -> Any:
    raise AssertionError("no models are opened")


def ran(body: Any, config: Any, inputs: Any, out: Path) -> Quiet:
    out.mkdir()
    recorder = Quiet()
    assert body(Stage(out.name, 0, config, inputs, RuntimeConfig(), no_models), out, recorder) == 0
    return recorder


def config(**fields: Any) -> FlywheelConfig:
    return FlywheelConfig.model_validate({"dpo": {}, "start": "ppo-2", "data": "prepare"} | fields)
