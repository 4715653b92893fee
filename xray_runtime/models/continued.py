"""Training that goes on with an adapter, instead of a new one on the weights into which it is merged."""

from __future__ import annotations

import logging
from pathlib import Path

from xray_runtime.kernel.graph.artifacts import ADAPTER
from xray_runtime.models.adapter_files import CONFIG_FILE, adapter_files, read_fields
from xray_runtime.models.lora import EXPERTS, LoRAConfig

log = logging.getLogger(__name__)


def continues(directory: Path, lora: LoRAConfig, stage: str) -> bool:
    """Whether adapters of `lora`, trained by `stage`, continue A and B of the one beside a checkpoint's weights; the
    log says so, and why not where there is one.

    It depends on the checkpoint and `lora` alone: both must have the same rank, scale and layers, which are linear ones
    without DoRA's norms, and be published merged, since the checkpoint has no other weights.
    """
    from xray_runtime.models.adapters import PEFT_PREFIX, adapted_layers
    from xray_runtime.models.causal_lm import skeleton

    if not (directory / ADAPTER / CONFIG_FILE).is_file():
        return False
    held, names = read_fields(directory / ADAPTER).lora, adapter_files(directory)
    layers = {name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in names}
    differs = [
        f"lora.{field} is {ours!r}, not {theirs!r}"
        for field in ("rank", "alpha", "rslora", "dora")
        if (ours := getattr(lora, field)) != (theirs := getattr(held, field))
    ]
    if lora.quantize is not None:
        differs.append(f"lora.quantize is {lora.quantize!r}")
    elif lora.publish != "merged":
        differs.append("lora.publish is 'adapter'")
    elif held.dora:
        differs.append("it has DoRA's norms")
    elif EXPERTS in (held.target_modules or ()):
        differs.append("it adapts experts")
    elif not differs and layers != set(adapted_layers(skeleton(str(directory)), lora)):
        differs.append("lora.target_modules names other layers")
    if differs:
        log.info("%s: new adapters on the merged weights of %s (%s)", stage, directory.name, "; ".join(differs))
    else:
        log.info("%s: continues the adapter of %s", stage, directory.name)
    return not differs
