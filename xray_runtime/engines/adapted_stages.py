"""Whether every pipeline stage of a model with adapters has something to train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xray_runtime.engines.topology import Topology

if TYPE_CHECKING:
    from xray_runtime.models.heads import HeadedLM


def check_adapted_stages(module: HeadedLM, stages: int, field: str) -> None:
    """Raises ValueError if a stage would have no adapter: it has no gradient to hand on, and its peers wait for one."""
    if module.adapters is None:
        return
    adapted, topology = [*module.adapters.layers, *module.adapters.experts], Topology(pipeline=stages)
    for stage in range(stages):
        layers = topology.layers(stage, len(module.layers))
        own = tuple(f"{module.parts.layers}.{number}." for number in layers)
        if not any(name.startswith(own) for name in adapted):
            raise ValueError(
                f"{field}.pipeline_parallel: {stages} is not allowed with lora.target_modules: "
                f"{module.adapters.config.target_modules}: layers {layers[0]} to {layers[-1]} would be a stage without "
                "adapters"
            )
