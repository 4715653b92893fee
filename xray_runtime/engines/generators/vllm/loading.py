"""The import of vLLM, in a process of its own or in one whose forks become generators."""

from __future__ import annotations

import os
import sys
from typing import Any

KERNELS = "128"
"""How many kernels of matrix products oneDNN keeps, one for each number of tokens and each matrix of a layer. Its
default, 1,024, held 160 MiB after a few rollouts of the quickstart and was no faster."""


def environment(device: str, *, reproducible: bool = False) -> dict[str, str]:
    """Settings that vLLM reads at import; `reproducible` as in `RuntimeConfig`."""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    if device == "cpu":
        # Some of vLLM's samplers compile themselves even in eager mode, which takes 15 s at the first call.
        settings["TORCH_COMPILE_DISABLE"] = "1"
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        settings["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = KERNELS
    elif reproducible:
        # Kernels whose sums do not depend on the batch. Each reply has its own seed anyway.
        settings["VLLM_BATCH_INVARIANT"] = "1"
    return settings


def load_vllm(device: str, *, reproducible: bool = False) -> Any:
    """Import vLLM with the settings that it reads at import."""
    os.environ |= environment(device, reproducible=reproducible)
    if device == "cpu" and (dynamo := sys.modules.get("torch._dynamo")) is not None:
        # It read the setting when it was imported.
        dynamo.config.disable = True
    import vllm
    import vllm.entrypoints.llm

    if device == "cpu":
        # An engine imports them. Their operators look through all modules for the file that registers them, so that a
        # fork would get copies of all pages that have one.
        import vllm._custom_ops
        import vllm.v1.worker.cpu_worker
        from vllm.triton_utils import dispatcher

        dispatcher.sys = _OwnModules()
    return vllm


class _OwnModules:
    """`sys` for vLLM's search for its kernels, which touches all that a module has: 85 MiB that a fork would share."""

    @property
    def modules(self) -> dict[str, Any]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
