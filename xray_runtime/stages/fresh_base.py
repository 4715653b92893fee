"""Declaration of the stage kind `fresh_base`."""

from __future__ import annotations

from xray_runtime.config.base import FreshBase
from xray_runtime.graph.artifacts import Model
from xray_runtime.graph.inputs import FreshBaseInputs
from xray_runtime.graph.kind import StageKind, register

FRESH_BASE = register(
    StageKind(
        "fresh_base",
        FreshBase,
        FreshBaseInputs,
        Model,
        "xray_runtime.preparation.fresh_base:run",
        base_model=lambda config: config,
        title="a model with random weights, the start of the lifecycle",
    )
)
