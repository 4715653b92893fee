"""vLLM's side of the weight transfer: one engine for its native interface, whichever way the weights come.

From Ray's object store they are handed over as tensors; from GPU to GPU vLLM's own `nccl` or `ipc` engine receives
them. vLLM's layer-wise reload fuses and lays out incoming Hugging Face weights as a load from disk would; a layer
that receives nothing keeps what it had.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

BACKEND = "xray"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What vLLM's own engine `backend` is to agree on with the trainer; nothing for the object store."""

    backend: str = ""
    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Tensors of an update, or what vLLM's own engine needs to receive some."""

    tensors: Iterator[tuple[str, torch.Tensor]] = field(default_factory=lambda: iter(()))
    direct: dict[str, Any] | None = None


class XrayWeightTransferEngine(WeightTransferEngine):
    """Loads what comes, in sessions that can be broken off."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _direct: WeightTransferEngine | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        if init_info.backend:
            config = WeightTransferConfig(backend=init_info.backend)
            self._direct = WeightTransferEngineFactory.create_engine(config, self.vllm_config, self.device, self.model)
            self._direct.init_transfer_engine(self._direct.parse_init_info(init_info.info))

    def start_weight_update(self) -> None:
        self._abandon()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.direct is not None:
            assert self._direct is not None
            self._direct.receive_weights(self._direct.parse_update_info(update_info.direct))
        else:
            model: Any = self.model
            model.load_weights(update_info.tensors)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # An output layer tied to the embedding receives nothing of its own, so the reload leaves it the copy that CPU
        # kernels packed from the *old* embedding. Pack it again.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        if self._direct is not None:
            self._direct.shutdown()
            self._direct = None

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
    """Make the back end known to vLLM in this process (again is fine)."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, XrayWeightTransferEngine)
