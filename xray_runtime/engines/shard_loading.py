"""A rank's own part of a checkpoint: the model is cut as a skeleton, and only what is left of it is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor, nn

from xray_runtime.engines.states import cut, hugging_face_name
from xray_runtime.models.heads import BorrowedHead, HeadedLM
from xray_runtime.models.tensor_file import WEIGHTS_FILE

if TYPE_CHECKING:
    from xray_runtime.engines.training.tensor import Split

EMBEDDING = "model.embed_tokens.weight"


def fill(
    module: HeadedLM, checkpoint: Path, splits: Mapping[str, Split], tensor_rank: int, device: torch.device
) -> None:
    """Give the parameters of `module` that are on the meta device their values, in float32 on `device`.

    They are read one at a time, of split ones this rank's slice alone; buffers that a checkpoint holds, whole.

    Raises:
        ValueError: the checkpoint does not have one of them.
    """
    if not any(parameter.is_meta for parameter in module.parameters()):
        return
    values: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            tensor = read(checkpoint, hugging_face_name(name), splits.get(name), tensor_rank).to(device)
            values[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
            # AutoTP keeps notes on parameters.
            values[id(parameter)].__dict__ |= parameter.__dict__
    for owner in module.modules():
        for key, old in owner._parameters.items():
            # By identity, so that tied parameters stay tied.
            owner._parameters[key] = values.get(id(old), old)
    head = module.lm.lm_head if hasattr(module.lm, "lm_head") else None
    if isinstance(head, BorrowedHead) and head.weight.is_meta:
        head.weight = read(checkpoint, EMBEDDING).to(device).requires_grad_()
    held = module.state_dict()
    for name, buffer in module.named_buffers():
        if name in held:
            buffer.copy_(read(checkpoint, hugging_face_name(name)))
    module.to(device)


def read(checkpoint: Path, name: str, split: Split | None = None, tensor_rank: int = 0) -> Tensor:
    """A tensor of a checkpoint under its Hugging Face name in float32, or this rank's slice of it.

    Raises:
        ValueError: the checkpoint does not have it.
    """
    # Opened for each: what a mapped file has shown stays in this process's memory until it is closed.
    with safe_open(checkpoint / WEIGHTS_FILE, framework="pt") as file:
        if name not in set(file.keys()):
            raise ValueError(f"{checkpoint}: has no weights for {name}")
        return cut(file.get_slice(name), split, tensor_rank).to(torch.float32, copy=True)
