"""Stage prepare, run in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.pairs import Example, Pairs
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.graph.kind import NoInputs
from xray_runtime.methods.prepare.body import run
from xray_runtime.methods.prepare.config import DataConfig


def prepare(
    out: Path, seed: int = 0, **config: Any
) -> tuple[list[Example], list[Example], dict[str, int], FakeRecorder]:
    """(train, held-out rows, counts, recorder) of a run with these fields of `DataConfig`."""
    out.mkdir()
    stage: Any = Stage("prepare", seed, DataConfig(**config), NoInputs(), RuntimeConfig(), None)  # type: ignore[arg-type]
    recorder = FakeRecorder(out)
    assert run(stage, out, recorder) == 0
    stats = json.loads((out / "stats.json").read_text())
    train, heldout = (list(Pairs(out / f"{side}.arrow", Example)) for side in ("train", "heldout"))
    return train, heldout, stats, recorder
