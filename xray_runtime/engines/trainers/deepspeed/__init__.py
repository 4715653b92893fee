"""DeepSpeed: ZeRO over data-parallel ranks, AutoTP's tensor parallelism, and a pipeline of our own around them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.engines.capabilities import Sharding, TrainerCapabilities
from xray_runtime.engines.trainers.deepspeed.config import DeepSpeedConfig

if TYPE_CHECKING:
    import torch

    from xray_runtime.engines.engine import Engine, Scorer
    from xray_runtime.engines.layouts import FrozenConfig
    from xray_runtime.engines.training_config import TrainingConfig
    from xray_runtime.kernel.config.section import RuntimeConfig
    from xray_runtime.models.heads import HeadedLM


class DeepSpeed:
    """See `Trainer`."""

    config = DeepSpeedConfig
    capabilities = TrainerCapabilities(
        tensor_parallel=True,
        pipeline_parallel=True,
        sequence_parallel=True,
        routes=True,
        activation_checkpointing=True,
        lora=True,
        quantized=True,
        trainable_layers=True,
        scoring=True,
        offload=True,
        pictures=True,
        on_cpu={"offload": ("none", "cpu")},
        sharding=Sharding(
            levels=(0, 1, 2, 3),
            split_levels=(0, 1, 2),
            bucket_elements=500_000_000,
            copies_float32=True,
            keeps_gradients=True,
        ),
    )

    def load_libraries(self, runtime: RuntimeConfig, device: str) -> None:
        from xray_runtime.engines.trainers.deepspeed.setup import load_deepspeed

        load_deepspeed(device)

    def engine(self, module: HeadedLM, training: TrainingConfig, checkpoint: Path, device: torch.device) -> Engine:
        from xray_runtime.engines.trainers.deepspeed.build import engine

        return engine(module, training, checkpoint, device)

    def scorer(self, module: HeadedLM, layout: FrozenConfig, checkpoint: Path, device: torch.device) -> Scorer:
        from xray_runtime.engines.trainers.deepspeed.build import scorer

        return scorer(module, layout, checkpoint, device)

    def can_split(self, model: str) -> tuple[bool, bool]:
        from xray_runtime.engines.trainers.deepspeed.build import can_split

        return can_split(model)

    def planned(self, level: int | None, *, offload: bool) -> Mapping[str, int | str | None]:
        fields: dict[str, int | str | None] = {} if level is None else {"zero_stage": level}
        return fields | ({"offload": "cpu", "nvme_path": None} if offload else {})


TRAINER = DeepSpeed()
