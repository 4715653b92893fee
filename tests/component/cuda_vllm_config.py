"""Prints what vLLM makes of our options on a platform that says it is CUDA: a program of its own, since vLLM asks for
the platform once. `python -m tests.component.cuda_vllm_config DIRECTORY`.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any


def main(directory: Path) -> None:
    # CUDA's operators, which a build for CPUs lacks and a config does not call.
    for name in ("_C", "_C_stable_libtorch"):
        sys.modules[f"vllm.{name}"] = types.ModuleType(name)
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    from xray_runtime.engines.generators.vllm.sampler import engine_options
    from xray_runtime.engines.sampling import EngineRank
    from xray_runtime.kernel.config.section import RuntimeConfig

    class H100(NonNvmlCudaPlatform):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 * 2**30

        def is_cumem_allocator_available(self) -> bool:
            return True

    setattr(platforms, "_current_platform", H100())  # noqa: B010
    # It takes the platform when it is imported.
    from vllm.engine.arg_utils import EngineArgs

    found = []
    for runtime in (RuntimeConfig(device="cuda", generator_sleeps=True, max_num_seqs=48), RuntimeConfig(device="cuda")):
        options = engine_options(directory, 64, runtime, EngineRank("cuda"))
        config = EngineArgs(
            model=str(directory), skip_tokenizer_init=True, load_format="safetensors", max_model_len=64, **options
        ).create_engine_config()
        found.append(
            {
                "device": config.device_config.device_type,
                "dtype": str(config.model_config.dtype),
                "sleeps": config.model_config.enable_sleep_mode,
                "max_num_seqs": config.scheduler_config.max_num_seqs,
                "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
                "prefix_caching": config.cache_config.enable_prefix_caching,
                "gpu_memory": config.cache_config.gpu_memory_utilization,
                "graphs": config.compilation_config.cudagraph_mode.name != "NONE",
            }
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
