"""FSDP2: torch's own sharding (`fully_shard`) over data-parallel ranks, with AdamW or Muon."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.engines.capabilities import Sharding, TrainerCapabilities
from xray_runtime.engines.trainer import Trainer
from xray_runtime.engines.trainers.fsdp2.config import FSDP2Config

if TYPE_CHECKING:
    import torch

    from xray_runtime.engines.engine import Engine, Scorer
    from xray_runtime.engines.layouts import FrozenConfig
    from xray_runtime.engines.training_config import TrainingConfig
    from xray_runtime.kernel.config.section import RuntimeConfig
    from xray_runtime.models.heads import HeadedLM


class FSDP2(Trainer):
    """See `Trainer`."""

    config = FSDP2Config
    capabilities = TrainerCapabilities(
        expert_parallel=True,
        sequence_parallel=True,
        routes=True,
        activation_checkpointing=True,
        lora=True,
        quantized=True,
        trainable_layers=True,
        scoring=True,
        # Plans assume AdamW; Muon has one moment a hidden matrix instead of two.
        sharding=Sharding(levels=(2, 3), gathered_layers=2),
    )

    def load_libraries(self, runtime: RuntimeConfig, device: str) -> None:
        from xray_runtime.engines.trainers.fsdp2 import engine  # noqa: F401

    def engine(self, module: HeadedLM, training: TrainingConfig, checkpoint: Path, device: torch.device) -> Engine:
        from xray_runtime.engines.trainers.fsdp2.engine import FSDP2Engine

        return FSDP2Engine(module, training, checkpoint, device)

    def scorer(self, module: HeadedLM, layout: FrozenConfig, checkpoint: Path, device: torch.device) -> Scorer:
        from xray_runtime.engines.trainers.fsdp2.engine import scorer

        return scorer(module, layout, checkpoint, device)

    def can_split(self, model: str) -> tuple[bool, bool]:
        return False, False

    def planned(self, level: int | None, *, offload: bool) -> Mapping[str, int | str | None]:
        return {} if level is None else {"zero_stage": level}


TRAINER = FSDP2()
