"""Megatron-core: its layers, pipeline schedules and distributed optimizer, for Llamas."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.engines.capabilities import TrainerCapabilities
from xray_runtime.engines.trainer import Trainer
from xray_runtime.engines.trainers.megatron.config import MegatronConfig

if TYPE_CHECKING:
    import torch

    from xray_runtime.engines.engine import Engine
    from xray_runtime.engines.training_config import TrainingConfig
    from xray_runtime.kernel.config.section import RuntimeConfig
    from xray_runtime.models.heads import HeadedLM


class Megatron(Trainer):
    """See `Trainer`."""

    config = MegatronConfig
    capabilities = TrainerCapabilities(
        tensor_parallel=True,
        pipeline_parallel=True,
        lora=True,
        on_cpu={"pipeline_parallel": (1,), "zero_stage": (None, 0)},
        tensor_divides=("intermediate_size",),
        pipeline_divides=("num_layers",),
    )

    def load_libraries(self, runtime: RuntimeConfig, device: str) -> None:
        from xray_runtime.engines.trainers.megatron import engine  # noqa: F401

    def engine(self, module: HeadedLM, training: TrainingConfig, checkpoint: Path, device: torch.device) -> Engine:
        from xray_runtime.engines.trainers.megatron.engine import MegatronEngine

        return MegatronEngine(module, training, checkpoint, device)


TRAINER = Megatron()
