"""Declaration of the stage kind `base`."""

from __future__ import annotations

from xray_runtime.kernel.graph.artifacts import Model
from xray_runtime.kernel.graph.kind import NoInputs, StageKind, register
from xray_runtime.methods.base.config import HubBase
from xray_runtime.methods.common.findings import base_findings


def _base_reads(config: HubBase) -> dict[str, str]:
    template = config.chat_template or ""
    read = {"chat_template": template} if template.endswith(".jinja") else {}
    return {"model": config.model} | read | ({"adapter": config.adapter} if config.adapter else {})


BASE = register(
    StageKind(
        "base",
        HubBase,
        NoInputs,
        Model,
        "xray_runtime.methods.base.body:run",
        base_model=lambda config: config.model,
        outside=_base_reads,
        findings=base_findings,
        title="the pretrained model, the start of the lifecycle",
    )
)
