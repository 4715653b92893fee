"""Adapters on disk, in the form that peft writes and that vLLM and transformers read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.graph.artifacts import ADAPTER

if TYPE_CHECKING:
    from torch import Tensor

    from xray_runtime.models.lora import LoRAConfig

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
    # Copies, since safetensors refuses tensors in one memory, as an update has them.
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(held, directory / TENSORS_FILE)


def adapter_files(checkpoint: Path) -> dict[str, Path]:
    """Tensor → its file, of the adapter beside a checkpoint's weights. Raises FileNotFoundError: it has none."""
    file = checkpoint / ADAPTER / TENSORS_FILE
    with safe_open(file, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), file)


def with_adapter(lm: Any, directory: Path, field: str) -> Any:
    """`lm` with the LoRA adapter in `directory` merged into its weights, as peft merges it.

    Raises:
        ValueError: the directory has no such adapter in safetensors form, or it is another model's; the message begins
            with `field`.
    """
    from peft import PeftModel, get_peft_model_state_dict

    refused = f"{field}: {str(directory)!r} is not allowed"
    misfit = f"its layers are not those of this {type(lm).__name__}"
    for name in (CONFIG_FILE, TENSORS_FILE):
        if not (directory / name).is_file():
            raise ValueError(f"{refused}: it has no {name}")
    try:
        config, held = json.loads((directory / CONFIG_FILE).read_bytes()), load_file(directory / TENSORS_FILE)
        if (kind := config.get("peft_type")) != "LORA":
            raise ValueError(f"its peft_type is {kind}: must be LORA")
        peft = PeftModel.from_pretrained(lm, str(directory), local_files_only=True)
    except Exception as error:
        # peft, safetensors and torch raise in forms of their own; torch where sizes differ.
        reason = misfit if isinstance(error, RuntimeError) else first_line(error)
        raise ValueError(f"{refused}: {reason}") from error
    # What the model has no layer for peft leaves out, with a warning.
    taken = get_peft_model_state_dict(peft)
    lost = [n for n, tensor in held.items() if n not in taken or not torch.equal(taken[n].float(), tensor.float())]
    if lost or len(taken) != len(held):
        name = min(lost or taken.keys() - held.keys())
        raise ValueError(f"{refused}: {misfit} ({name})")
    return peft.merge_and_unload()
