"""Declaration of the stage kind `base`."""

from __future__ import annotations

from xray_runtime.config.base import HubBase
from xray_runtime.graph.artifacts import Model
from xray_runtime.graph.kind import NoInputs, StageKind, register
from xray_runtime.stages.findings import base_findings


def _base_reads(config: HubBase) -> dict[str, str]:
    template = config.chat_template or ""
    return {"model": config.model} | ({"chat_template": template} if template.endswith(".jinja") else {})


BASE = register(
    StageKind(
        "base",
        HubBase,
        NoInputs,
        Model,
        "xray_runtime.preparation.base:run",
        base_model=lambda config: config.model,
        outside=_base_reads,
        findings=base_findings,
        title="the pretrained model, the start of the lifecycle",
    )
)
