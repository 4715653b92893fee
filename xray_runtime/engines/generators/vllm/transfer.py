"""vLLM's side of the weight transfer: one engine for its native interface and all transports.

Weights from Ray's object store arrive as tensors; between GPUs vLLM's `nccl` or `ipc` engine receives them. vLLM's code
fuses and lays out Hugging Face weights as after a load from disk; other layers keep their weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from xray_runtime.engines.generators.vllm.reload import Reloader, close, record
from xray_runtime.models.weight_files import tensors

BACKEND = "xray"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Init info for vLLM's own engine `backend`; empty for the object store."""

    backend: str = ""
    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Tensors of an update, or update info for vLLM's own engine."""

    tensors: Iterator[tuple[str, torch.Tensor]] = field(default_factory=lambda: iter(()))
    direct: dict[str, Any] | None = None


class XrayWeightTransferEngine(WeightTransferEngine):
    """Loads weights in sessions that can be aborted."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _direct: WeightTransferEngine | None = None
    _reloading = False
    """Whether vLLM's own reload is in progress."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        if init_info.backend:
            config = WeightTransferConfig(backend=init_info.backend)
            self._direct = WeightTransferEngineFactory.create_engine(config, self.vllm_config, self.device, self.model)
            self._direct.init_transfer_engine(self._direct.parse_init_info(init_info.info))

    @cached_property
    def _shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in tensors(Path(self.vllm_config.model_config.model))}

    @cached_property
    def _reloader(self) -> Reloader | None:
        """None if only vLLM's own reload can load this model."""
        with set_current_vllm_config(self.vllm_config):
            return record(self.model, self._shapes)

    def layers_of(self, names: set[str]) -> set[str]:
        """`names` and all tensors to load with them; vLLM's own reload would leave a part of a layer uninitialized."""
        return names | set(self._shapes) if self._reloader is None else self._reloader.with_siblings(names)

    def start_weight_update(self) -> None:
        # vLLM counts elements; those of an aborted update would count twice.
        close(self.model)
        self._reloading = False
        if current_platform.is_cpu():
            # A layer of experts only packs new weights while it has no kernel.
            for module in self.model.modules():
                method = getattr(module, "quant_method", None)
                if isinstance(method, UnquantizedFusedMoEMethod):
                    method.moe_kernel = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.direct is None and self._reloader is not None:
            self._reloader.load(update_info.tensors, self.vllm_config.model_config.dtype)
            return
        if not self._reloading:
            initialize_layerwise_reload(self.model)
            self._reloading = True
        if update_info.direct is not None:
            assert self._direct is not None
            self._direct.receive_weights(self._direct.parse_update_info(update_info.direct))
        else:
            model: Any = self.model
            model.load_weights(update_info.tensors)

    def finish_weight_update(self) -> None:
        if not self._reloading:
            return
        if self._direct is None:
            finalize_layerwise_reload(self.model, self.model_config)
        else:
            # The same, and `ipc` lets go of the trainer's buffer, which could not be freed there before.
            self._direct.finish_weight_update()
        # A tied output layer receives nothing, so CPU kernels still have a copy of the *old* embedding. Pack it again.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        if self._direct is not None:
            self._direct.shutdown()
            self._direct = None


def register(backend: str = BACKEND, engine: type[WeightTransferEngine] = XrayWeightTransferEngine) -> None:
    """Register a back end with vLLM in this process. Safe to repeat."""
    if backend not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(backend, engine)
