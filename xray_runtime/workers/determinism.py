"""Settings that decide whether a GPU computes the same bits twice: `runtime.reproducible` and `runtime.tf32`.

A CPU always does, with the settings of every Workhorse. On CUDA it costs speed, so it is off by default; then neither
torch nor vLLM is slowed down by settings that promise nothing.
"""

from __future__ import annotations

from typing import Any

from xray_runtime.config.runtime import RuntimeConfig

CUDA_ENVIRONMENT = {
    # Without a fixed workspace cuBLAS may sum in another order.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # One algorithm without reductions inside a switch, so that sums over ranks have one order.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",
}


def cuda_environment(runtime: RuntimeConfig) -> dict[str, str]:
    """Variables that must be set before CUDA starts. A CPU ignores them."""
    return CUDA_ENVIRONMENT if runtime.reproducible else {}


def configure_torch(runtime: RuntimeConfig, device: str, *, samples: bool) -> None:
    """Set torch's switches in this process.

    Args:
        samples: vLLM has a mode of its own (`engines.generation.vllm.environment`), and sampling needs operators
            without a deterministic form on CUDA, so nothing is refused there.
    """
    import torch

    on_cpu = device == "cpu"
    # Attention's backward pass is deterministic on CUDA only where torch would refuse operators that are not.
    torch.use_deterministic_algorithms(on_cpu or runtime.reproducible, warn_only=on_cpu or samples)
    # Filling uninitialized memory would cost 1,000 fills a step; nothing reads it.
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False
    if not on_cpu:
        torch.backends.cudnn.deterministic = runtime.reproducible
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = runtime.tf32
