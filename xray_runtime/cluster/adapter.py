"""Adapters that a model trains, as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.kernel.graph.artifacts import ADAPTER
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.manifest import MANIFEST

if TYPE_CHECKING:
    from xray_runtime.engines.sync.object_store import WeightUpdate
    from xray_runtime.models.lora import LoRAConfig


def save_adapter(
    update: WeightUpdate, directory: Path, lora: LoRAConfig, base: Path, *, continues: bool = False
) -> None:
    """Write adapters in peft's form, with the digest of the checkpoint `base` that they belong to; of those that
    continue an adapter beside it, the checkpoint of that adapter."""
    from xray_runtime.engines.sync.object_store import unpack
    from xray_runtime.models.adapter_files import read_fields, write_adapter
    from xray_runtime.models.causal_lm import skeleton
    from xray_runtime.models.expert_adapters import expert_matrices
    from xray_runtime.models.lora import EXPERTS

    tensors = {name: tensor for bucket in update.buckets for name, tensor in unpack(bucket)}
    if continues:
        _, name, sha256 = read_fields(base / ADAPTER)
    else:
        name, sha256 = base.name, file_sha256(base / MANIFEST) if (base / MANIFEST).is_file() else ""
    matrices = expert_matrices(skeleton(str(base))) if EXPERTS in (lora.target_modules or ()) else []
    write_adapter(directory, lora, tensors, name, sha256, matrices)
