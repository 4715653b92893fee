"""Declaration of the stage kind `prepare`."""

from __future__ import annotations

from xray_runtime.kernel.graph.artifacts import Dataset
from xray_runtime.kernel.graph.kind import NoInputs, StageKind, register
from xray_runtime.methods.common.findings import data_findings
from xray_runtime.methods.prepare.config import DataConfig


def _data_read(config: DataConfig) -> dict[str, str]:
    mixed = {f"sources.{number}.source": part.source for number, part in enumerate(config.sources)}
    withdrawn = {"withdrawn": config.withdrawn} if config.withdrawn is not None else {}
    pictures = {"pictures": config.pictures} if config.pictures is not None else {}
    return (mixed or {"source": config.source}) | withdrawn | pictures


PREPARE = register(
    StageKind(
        "prepare",
        DataConfig,
        NoInputs,
        Dataset,
        "xray_runtime.methods.prepare.body:run",
        computes=False,
        outside=_data_read,
        headline={"train_pairs": "training pairs", "heldout_pairs": "held-out pairs"},
        findings=data_findings,
        results="stats.json",
    )
)
