"""vLLM's side of the weight transfer: an engine for its native interface that takes tensors as they come.

Registered under the name "plasma": the tensors are read from Ray's object store. vLLM's layer-wise reload fuses and
lays out incoming Hugging Face weights exactly as a load from disk would; layers that receive nothing keep what they
had.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

BACKEND = "plasma"


@dataclass
class PlasmaInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: object references carry their own addresses."""


@dataclass
class PlasmaUpdateInfo(WeightTransferUpdateInfo):
    """All tensors of one update."""

    tensors: Iterator[tuple[str, torch.Tensor]] = field(default_factory=lambda: iter(()))


class PlasmaWeightTransferEngine(WeightTransferEngine):
    """Loads what a trainer put into the object store."""

    init_info_cls = PlasmaInitInfo
    update_info_cls = PlasmaUpdateInfo

    def init_transfer_engine(self, init_info: PlasmaInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self._abandon()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: PlasmaUpdateInfo) -> None:
        model: Any = self.model
        model.load_weights(update_info.tensors)
        # Finished here and not in `finish_weight_update`: after an error there vLLM would never start another update.
        finalize_layerwise_reload(self.model, self.model_config)
        # An output layer tied to the embedding receives nothing of its own, so the reload leaves it the copy that CPU
        # kernels packed from the *old* embedding. Pack it again.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def _abandon(self) -> None:
        """Give layers that an update broken off half-way left open their tensors back, and forget what had arrived.

        vLLM counts the elements that arrive: what was left would be counted twice.
        """
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                _place_kernel_tensors(layer, info)
                info.reset()


def register() -> None:
    """Make the "plasma" back end known to vLLM in this process (again is fine)."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, PlasmaWeightTransferEngine)
