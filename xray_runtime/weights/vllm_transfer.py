"""vLLM's side of the weight transfer: an engine for its native interface that reads Ray's object store.

Registered under the name "plasma". `start`/`finish` run vLLM's layer-wise reload, which fuses and lays out incoming
Hugging Face weights exactly as a load from disk would; layers that receive nothing keep what they had.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from xray_runtime.weights.plasma import Bucket, unpack

BACKEND = "plasma"


@dataclass
class PlasmaInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: object references carry their own addresses."""


@dataclass
class PlasmaUpdateInfo(WeightTransferUpdateInfo):
    """One bucket of weights."""

    bucket: Bucket = field(default_factory=lambda: Bucket(None, ()))


class PlasmaWeightTransferEngine(WeightTransferEngine[PlasmaInitInfo, PlasmaUpdateInfo]):
    """Loads weights that a trainer put into the object store."""

    init_info_cls = PlasmaInitInfo
    update_info_cls = PlasmaUpdateInfo

    def init_transfer_engine(self, init_info: PlasmaInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: PlasmaUpdateInfo) -> None:
        model: Any = self.model
        model.load_weights(unpack(update_info.bucket))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # An output layer tied to the embedding receives nothing of its own, so the reload leaves it the copy that CPU
        # kernels packed from the *old* embedding. Pack it again.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        pass


def register() -> None:
    """Make the "plasma" back end known to vLLM in this process (again is fine)."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, PlasmaWeightTransferEngine)
