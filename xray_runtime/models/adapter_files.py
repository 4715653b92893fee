"""Adapters on disk, in the form that peft writes and that vLLM and transformers read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.graph.artifacts import ADAPTER
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.manifest import MANIFEST
from xray_runtime.models.config import CONFIG_FILE as CONFIG_FILE
from xray_runtime.models.lora import EXPERTS, LoRAConfig

if TYPE_CHECKING:
    from torch import Tensor

TENSORS_FILE = "adapter_model.safetensors"


def write_adapter(
    directory: Path,
    config: LoRAConfig,
    tensors: Mapping[str, Tensor],
    base: str | None = None,
    sha256: str = "",
    matrices: Sequence[str] = (),
) -> None:
    """Write an adapter.

    Args:
        tensors: `Adapters.unmerged`.
        base: name of the model that it belongs to.
        sha256: digest of that model's manifest.
        matrices: names of the parameters of its adapted experts.
    """
    directory.mkdir(parents=True, exist_ok=True)
    names = {name.rpartition(".lora_")[0].removesuffix(".base_layer").rpartition(".")[2] for name in tensors}
    fields = config.peft_fields(base, sorted(names - {EXPERTS}), matrices)
    content = fields | ({"base_sha256": sha256} if sha256 else {})
    (directory / CONFIG_FILE).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    # Copies, since safetensors refuses tensors in one memory, as an update has them.
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(held, directory / TENSORS_FILE)


def keep_adapter(adapter: Path, directory: Path, base: str) -> None:
    """Write an adapter of others, merged by `with_adapter`, into `directory`, if it is one of `LoRAConfig`: training
    may go on from it (`continued`)."""
    config, tensors = json.loads((adapter / CONFIG_FILE).read_bytes()), load_file(adapter / TENSORS_FILE)
    others = [name for name in ("rank_pattern", "alpha_pattern", "use_dora", "target_parameters") if config.get(name)]
    sides = {name.rpartition(".lora_")[2]: tensor.shape[0] for name, tensor in tensors.items()}
    if others or sides.keys() != {"A.weight", "B.weight"} or sides["A.weight"] != config["r"]:
        return
    scale: dict[str, Any] = {"alpha": float(config["lora_alpha"]), "rslora": bool(config.get("use_rslora", False))}
    try:
        lora = LoRAConfig(rank=config["r"], **scale)
    except ValueError:  # a rank or a scale that training does not have
        return
    write_adapter(directory, lora, {name: tensor.float() for name, tensor in tensors.items()}, base)


class AdapterFields(NamedTuple):
    """The content of an adapter's config."""

    lora: LoRAConfig
    base: str
    """Name of the model that it belongs to."""
    base_sha256: str
    """Digest of that model's manifest; empty where peft wrote it."""


def read_fields(directory: Path) -> AdapterFields:
    """The fields of an adapter that `write_adapter` wrote. Raises ValueError: they are not what it writes."""
    held = json.loads((directory / CONFIG_FILE).read_bytes())
    lora = LoRAConfig(
        rank=held["r"],
        alpha=float(held["lora_alpha"]),
        rslora=held["use_rslora"],
        dora=held["use_dora"],
        target_modules=held["target_modules"] + ([EXPERTS] if held.get("target_parameters") else []),
    )
    return AdapterFields(lora, held["base_model_name_or_path"] or "", held.get("base_sha256", ""))


def adapter_files(checkpoint: Path) -> dict[str, Path]:
    """Tensor → its file, of the adapter beside a checkpoint's weights. Raises FileNotFoundError: it has none."""
    file = checkpoint / ADAPTER / TENSORS_FILE
    with safe_open(file, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), file)


def with_adapter(lm: Any, directory: Path, field: str, base: Path) -> Any:
    """`lm` with the LoRA adapter in `directory` merged into its weights, as peft merges it.

    Args:
        base: the directory of `lm`, if it is one.

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
        expected, manifest = config.get("base_sha256"), base / MANIFEST
        if expected and manifest.is_file() and (actual := file_sha256(manifest)) != expected:
            raise ValueError(f"it was trained on the checkpoint {expected[:12]}, not on {actual[:12]}")
        peft = PeftModel.from_pretrained(lm, str(directory), local_files_only=True)
    except Exception as error:
        # peft, safetensors and torch raise in forms of their own; torch where sizes differ.
        reason = misfit if isinstance(error, RuntimeError) else first_line(error)
        raise ValueError(f"{refused}: {reason}") from error
    # peft reads the vocabulary's size from here, and otherwise asks a hub for what may be no name of a model there.
    peft.peft_config["default"].base_model_name_or_path = str(base)
    # peft leaves out tensors of layers that the model does not have, with no more than a warning.
    taken = get_peft_model_state_dict(peft)
    lost = [n for n, tensor in held.items() if n not in taken or not torch.equal(taken[n].float(), tensor.float())]
    if lost or len(taken) != len(held):
        name = min(lost or taken.keys() - held.keys())
        raise ValueError(f"{refused}: {misfit} ({name})")
    return peft.merge_and_unload()
