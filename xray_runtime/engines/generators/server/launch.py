"""vLLM's own server, with the options by which a Workhorse's vLLM samples and with calls that take weights."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from xray_runtime.engines.generators.vllm.loading import environment
from xray_runtime.engines.generators.vllm.sampler import model_options
from xray_runtime.engines.sampling import EngineRank
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.store.location import locate

KEY = "XRAY_API_KEY"
"""Environment variable with the key that every request must bring."""
ENTRY = "vllm.entrypoints.launchers.api_server.entry"
EXTENSION = "xray_runtime.engines.generators.server.worker.WorkerExtension"
GUARD = "xray_runtime.engines.generators.server.guard.KeyGuard"


def find_model(model: str) -> Path:
    """The directory of `model`, a directory or the name of a hub's repository. Raises ValueError: there is none with
    safetensors files."""
    name, gguf = locate(model, "MODEL")
    if gguf is not None:
        raise ValueError(f"MODEL: {model!r} is not allowed: must have safetensors files")
    if Path(name).is_dir():
        return Path(name).resolve()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except (OSError, ValueError) as error:
        raise ValueError(f"MODEL: {model!r} cannot be fetched ({type(error).__name__})") from None


def arguments(
    directory: Path,
    address: tuple[str, int],
    max_length: int,
    runtime: RuntimeConfig,
    device: str,
    tensor_parallel: int = 1,
) -> list[str]:
    """The command line of vLLM's server.

    Args:
        directory: the model, whose weights a run replaces.
        address: host and port to listen on.
        max_length: longest prompt and reply together, in tokens.
        device: "cpu" or "cuda".
        tensor_parallel: number of devices that the model is split over.
    """
    host, port = address
    options = {
        "model": directory,
        "host": host,
        "port": port,
        "tensor_parallel_size": tensor_parallel,
        "enable_scale_out": True,  # token ids in, token ids out
        "weight_transfer_config": json.dumps({"backend": "xray-http"}),
        "worker_extension_cls": EXTENSION,
        "middleware": GUARD,
        "disable_uvicorn_access_log": True,
        **model_options(directory, max_length, runtime, EngineRank(device)),
    }
    line = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        line += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return line


def serve(line: list[str], runtime: RuntimeConfig, device: str) -> None:
    """Run vLLM's server with `arguments` in this process, until it is stopped."""
    os.environ |= environment(device, reproducible=runtime.reproducible)
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # has the calls for weights
    sys.argv = [ENTRY, *line]
    runpy.run_module(ENTRY, run_name="__main__", alter_sys=True)
