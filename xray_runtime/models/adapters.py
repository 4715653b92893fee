"""LoRA adapters in a causal LM, through peft: beside a frozen matrix W stands scaling · B·A (Hu et al. 2021).

Only A [rank, in] and B [out, rank] are trained and saved in snapshots. Everywhere else, in checkpoints and generators,
the layer is one whole matrix again, W + scaling · B·A under its Hugging Face name, as peft's own `merge_and_unload`
makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from xray_runtime.kernel.errors import first_line
from xray_runtime.models.lora import LoRAConfig
from xray_runtime.models.weight_files import read_tensor, weight_files

ADAPTER = "default"
LINEAR = nn.Linear, Conv1D
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Config fields by which families name the number of experts in a layer."""


class Adapters:
    """The adapters of `lm`, which are put into it here; all else in it is frozen.

    Args:
        lm: a Hugging Face causal LM.
        checkpoint: its directory. Merging starts from these float32 weights, not from what passes run in, and
            so needs no gathering of them.
        seed: of A's first values; B begins as zeros, and the model as it was.

    Raises:
        ValueError: the model has no layer that `config.target_modules` names, or it is no linear layer.
    """

    def __init__(self, lm: Any, config: LoRAConfig, checkpoint: Path, seed: int) -> None:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        self._files = weight_files(checkpoint)
        output = lm.get_output_embeddings()
        wanted = LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            target_modules=linear_layers(lm) if config.target_modules is None else list(config.target_modules),
        )
        try:
            inject_adapter_in_model(wanted, lm, ADAPTER)
        except ValueError as error:
            reason = first_line(error)
            raise ValueError(f"lora.target_modules: {config.target_modules} is not allowed: {reason}") from error
        self._layers = {name: module for name, module in lm.named_modules() if isinstance(module, LoraLayer)}
        for name, layer in self._layers.items():
            base = layer.get_base_layer()
            problem = None
            if base is output or isinstance(base, nn.Embedding):
                problem = "is an embedding or the output layer, which may share its weight with another"
            elif not isinstance(base, LINEAR):
                problem = f"is a {type(base).__name__}, such as the experts of a mixture, and no linear layer"
            if problem is not None:
                raise ValueError(f"lora.target_modules: {config.target_modules} is not allowed: {name} {problem}")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for layer in self._layers.values():
                # Beside a weight on the meta device, peft puts adapters there too.
                for side in (layer.lora_A, layer.lora_B):
                    side[ADAPTER].to_empty(device="cpu")
                layer.reset_lora_parameters(ADAPTER, init_lora_weights=True)

    def merged(self, whole: Callable[[nn.Parameter], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, W + scaling · B·A) of every adapted layer, float32, one at a time.

        `whole` gives an adapter's whole float32 value, however it is sharded; every rank that holds a part calls it.
        """
        for name, layer in self._layers.items():
            a, b = (whole(side[ADAPTER].weight) for side in (layer.lora_A, layer.lora_B))
            delta = (b @ a) * layer.scaling[ADAPTER]
            weight = read_tensor(self._files, f"{name}.weight").to(delta.device)
            yield f"{name}.weight", weight + (delta.T if layer.fan_in_fan_out else delta)


def linear_layers(lm: Any) -> list[str]:
    """Names of the linear layers of `lm` but its output layer and, in a mixture, its experts and what chooses them
    (peft's "all-linear" wraps these too, and then trains neither)."""
    output = lm.get_output_embeddings()
    mixtures = {name.rpartition(".")[0] for name, _ in lm.named_modules() if name.endswith(".experts")}
    counts = {getattr(lm.config, field, None) for field in NUM_EXPERTS}

    def is_adapted(name: str, module: nn.Module) -> bool:
        if not isinstance(module, LINEAR) or module is output or "experts" in name.split("."):
            return False
        return name.rpartition(".")[0] not in mixtures or module.weight.shape[0] not in counts

    return [name for name, module in lm.named_modules() if is_adapted(name, module)]
