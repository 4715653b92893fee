"""The model that a stage trains, from its config."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.engines.training_config import TrainingConfig
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.models.continued import continues

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.models.objectives import Objective


def trained_model(
    stage: Stage[Any, Any], directory: Path, objective: Objective[Any], role: str | None = None, **fields: Any
) -> ModelSpec:
    """The model that `stage` trains from a checkpoint, as its config says.

    Args:
        role: of the model, where the stage trains several.
        fields: further fields of the spec.
    """
    config: TrainingConfig = stage.config
    seed = derive_seed(stage.seed, stage.name, *([] if role is None else [role]), "adapters")
    defaults: dict[str, Any] = {"training": config, "trainable_layers": config.trainable_layers, "adapter_seed": seed}
    if "continues" not in fields:
        defaults["continues"] = config.lora is not None and continues(directory, config.lora, stage.name)
    return ModelSpec(directory, objective, **(defaults | fields))
