"""vLLM, in the process of a Workhorse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, cast

from pydantic import model_validator

from xray_runtime.engines.capabilities import GeneratorCapabilities, Transport
from xray_runtime.engines.generator import DirectSender, GenerationEngine, MemoryPool, Receivers
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sampling_config import MOST_REPORTED
from xray_runtime.kernel.plugs import unsupported

if TYPE_CHECKING:
    from torch import Tensor

    from xray_runtime.engines.sampling import EngineRank, Sampler
    from xray_runtime.kernel.config.section import RuntimeConfig
    from xray_runtime.models.lora import LoRAConfig


FP8 = {"dtype": "bfloat16", "quantization": "fp8_per_channel"}
"""vLLM's arguments; of its forms in 8 bits this one has kernels for CPU too."""


class VLLMConfig(GeneratorConfig):
    """Sampling with vLLM. Libraries and layouts round differently, so all fields are part of the key of every stage
    that samples."""

    engine: Literal["vllm"] = "vllm"
    """vLLM."""
    quantization: Literal["fp8"] | None = None
    """`fp8`: the matrices in 8 bits, each of their rows with a scale of its own, and all else in bfloat16. Training and
    what is published keep their precision, so `ppo.importance_correction` has the difference to correct."""

    @model_validator(mode="after")
    def _one_rank(self) -> Self:
        if self.quantization is not None and self.tensor_parallel > 1:
            raise ValueError(unsupported(f"quantization = {self.quantization!r}", "tensor_parallel above 1"))
        return self

    @property
    def rounds_weights(self) -> bool:
        return self.quantization is not None

    def precision(self, device: str) -> Literal["float32", "bfloat16"]:
        return "bfloat16" if self.rounds_weights else super().precision(device)


class VLLM(GenerationEngine):
    """See `GenerationEngine`."""

    config = VLLMConfig
    capabilities = GeneratorCapabilities(
        tensor_parallel=True,
        sleep=True,
        transports=("plasma", "nccl", "ipc"),
        fused_layers=(frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"})),
        bfloat16_on_gpu=True,
        adapters=True,
        adapter_rank=512,
        own_models=True,
        # On CUDA vLLM can say ids, and no weights.
        routes=("cpu",),
        top_logprobs=MOST_REPORTED,
        memory_pool=True,
    )

    def load_libraries(self, runtime: RuntimeConfig, device: str) -> None:
        from xray_runtime.engines.generators.vllm.loading import load_vllm

        load_vllm(device, reproducible=runtime.reproducible)

    def sampler(
        self,
        directory: Path,
        max_length: int,
        config: GeneratorConfig,
        runtime: RuntimeConfig,
        rank: EngineRank,
        adapter: LoRAConfig | None = None,
    ) -> Sampler:
        from xray_runtime.engines.generators.vllm.adapter import AdapterSampler
        from xray_runtime.engines.generators.vllm.sampler import VLLMSampler

        if adapter is None:
            quantized = isinstance(config, VLLMConfig) and config.quantization is not None
            return VLLMSampler(directory, max_length, runtime, rank, **(FP8 if quantized else {}))
        return AdapterSampler(directory, max_length, runtime, rank, adapter)

    def memory_pool(self) -> MemoryPool:
        from vllm.device_allocator.cumem import CuMemAllocator

        return cast("MemoryPool", CuMemAllocator.get_instance())

    def sender(
        self,
        transport: Transport,
        tensors: Callable[[], Iterator[tuple[str, Tensor]]],
        rank: int,
        receivers: Receivers,
    ) -> DirectSender:
        from xray_runtime.engines.generators.vllm.send import Sender

        return Sender(transport, tensors, rank, receivers)


GENERATOR = VLLM()
