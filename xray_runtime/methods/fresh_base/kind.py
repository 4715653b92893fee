"""Declaration of the stage kind `fresh_base`."""

from __future__ import annotations

from dataclasses import dataclass

from xray_runtime.kernel.graph.artifacts import Dataset, Model
from xray_runtime.kernel.graph.kind import StageKind, register
from xray_runtime.models.config import FreshBase


@dataclass(frozen=True)
class FreshBaseInputs:
    data: Dataset


FRESH_BASE: StageKind[FreshBase] = register(
    StageKind(
        "fresh_base",
        FreshBase,
        FreshBaseInputs,
        Model,
        "xray_runtime.methods.fresh_base.body:run",
        base_model=lambda config: config,
        title="a model with random weights, the start of the lifecycle",
    )
)
