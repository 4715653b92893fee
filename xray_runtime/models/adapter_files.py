"""Adapters on disk, in the form that peft writes and that vLLM and transformers read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file

if TYPE_CHECKING:
    from torch import Tensor

    from xray_runtime.models.lora import LoRAConfig

ADAPTER = "adapter"
"""The folder of a checkpoint with the adapter that was trained, beside the weights that have it merged."""
CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(
    directory: Path, config: LoRAConfig, tensors: Mapping[str, Tensor], base: str | None = None, sha256: str = ""
) -> None:
    """Write an adapter.

    Args:
        tensors: `Adapters.unmerged`.
        base: name of the model that it belongs to.
        sha256: digest of that model's manifest.
    """
    directory.mkdir(parents=True, exist_ok=True)
    layers = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors})
    content = config.peft_fields(base, layers) | ({"base_sha256": sha256} if sha256 else {})
    (directory / CONFIG_FILE).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, directory / TENSORS_FILE)
