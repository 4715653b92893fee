"""transformers' `generate`: any Hugging Face causal LM, on one device."""

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


class TransformersConfig(GeneratorConfig):
    """Sampling with transformers."""

    engine: Literal["transformers"] = "transformers"
    """transformers' `generate`."""


class Transformers(GenerationEngine):
    """See `GenerationEngine`."""

    config = TransformersConfig
    capabilities = GeneratorCapabilities(
        adapters=True,
        adapter_rank=1024,
        dora=True,
        expert_adapters=True,
        routes=("cpu", "cuda"),
        pictures=True,
        top_logprobs=MOST_REPORTED,
    )

    def load_libraries(self, runtime: RuntimeConfig, device: str) -> None:
        from xray_runtime.engines.generators.transformers import sampler  # noqa: F401

    def sampler(
        self,
        directory: Path,
        max_length: int,
        config: GeneratorConfig,
        runtime: RuntimeConfig,
        rank: EngineRank,
        adapter: LoRAConfig | None = None,
    ) -> Sampler:
        from xray_runtime.engines.generators.transformers.sampler import TransformersSampler

        return TransformersSampler(directory, rank, adapter)


GENERATOR = Transformers()
