"""DeepSpeed Inference: transformers' `generate` over a model that DeepSpeed has split."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from xray_runtime.engines.capabilities import GeneratorCapabilities
from xray_runtime.engines.generator import GenerationEngine
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sampling_config import MOST_REPORTED

if TYPE_CHECKING:
    from xray_runtime.engines.sampling import EngineRank, Sampler
    from xray_runtime.kernel.config.section import RuntimeConfig
    from xray_runtime.models.lora import LoRAConfig


class DeepSpeedInferenceConfig(GeneratorConfig):
    """Sampling with DeepSpeed Inference."""

    engine: Literal["deepspeed"] = "deepspeed"
    """DeepSpeed Inference."""


class DeepSpeedInference(GenerationEngine):
    """See `GenerationEngine`."""

    config = DeepSpeedInferenceConfig
    capabilities = GeneratorCapabilities(tensor_parallel=True, top_logprobs=MOST_REPORTED)

    def load_libraries(self, runtime: RuntimeConfig, device: str) -> None:
        from xray_runtime.engines.generators.deepspeed import sampler  # noqa: F401

    def sampler(
        self,
        directory: Path,
        max_length: int,
        config: GeneratorConfig,
        runtime: RuntimeConfig,
        rank: EngineRank,
        adapter: LoRAConfig | None = None,
    ) -> Sampler:
        from xray_runtime.engines.generators.deepspeed.sampler import DeepSpeedSampler

        return DeepSpeedSampler(directory, max_length, rank)


GENERATOR = DeepSpeedInference()
