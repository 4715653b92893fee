"""Load a rank's shard of a checkpoint: the model is sharded as a skeleton, then loaded one tensor at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from xray_runtime.engines.states import hugging_face_name
from xray_runtime.kernel.signs import part_done
from xray_runtime.models.causal_lm import load_model, saved_shapes, skeleton
from xray_runtime.models.family import Parts
from xray_runtime.models.head_layers import BorrowedHead
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.weight_files import MappedFiles, read_tensor, weight_files

SMALL = 100_000
"""Elements up to which rank 0 reads a parameter for all: below ZeRO-3's limit every rank may keep it whole."""


@dataclass(frozen=True)
class Split:
    """How a parameter is split over tensor-parallel ranks: along `dim`, into slices of these sizes."""

    dim: int
    sizes: tuple[int, ...]


class Partition(Protocol):
    """Shards parameters over data-parallel ranks as they are loaded."""

    by_share: bool
    """Whether ranks can fill in their shares by themselves."""

    def __call__(self, parameter: nn.Parameter, share: Callable[[int, int], Tensor] | None) -> None:
        """Leave every rank its share of a parameter that rank 0 has whole and the others have empty; with `share` all
        have it empty, and each fills in the elements `share(start, size)` of the flattened parameter."""


class Weights:
    """The initial float32 values of a rank's parameters, one at a time.

    Args:
        module: this rank's part of the model. Parameters on the meta device are read from the checkpoint; trained ones
            with values, a scalar head or adapters, are kept.
        checkpoint: in Hugging Face form.
        splits: parameters of which this rank, tensor-parallel peer `tensor_rank`, holds a slice.

    Raises:
        ValueError: the checkpoint lacks a parameter.
    """

    def __init__(
        self, module: nn.Module, checkpoint: Path, splits: Mapping[str, Split] | None = None, tensor_rank: int = 0
    ) -> None:
        self.splits, self._files, self._tensor_rank = splits or {}, weight_files(checkpoint), tensor_rank
        self._parts: Parts = getattr(module, "parts", Parts())
        self.mapped = MappedFiles()
        """The files behind values that were read with `mapped`."""
        self._branches = [
            (branch.first, {} if branch.checkpoint is None else weight_files(branch.checkpoint))
            for branch in getattr(module, "branches", ())
        ]
        self._given = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad and not p.is_meta}
        parameters, self._buffers = _to_read(module)
        # Checked here, where all ranks fail alike.
        sources = [self._source(name) for name in parameters | self._buffers]
        if missing := [plain for files, plain in sources if plain not in files]:
            raise ValueError(f"{checkpoint}: has no weights for {min(missing)}")

    def value(self, name: str, *, mapped: bool = False) -> Tensor:
        """The parameter `name`, or this rank's slice of it; with `mapped`, which is for what is never trained, on the
        pages of its file."""
        if name in self._given:
            return self._given[name]
        (files, plain), split = self._source(name), self.splits.get(name)
        read = self.mapped.read if mapped else read_tensor
        if split is None:
            return read(files, plain)
        low = sum(split.sizes[: self._tensor_rank])
        return read(files, plain, split.dim, low, low + split.sizes[self._tensor_rank])

    def share(self, name: str, start: int, size: int) -> Tensor:
        """`size` elements of the flat parameter from `start` on, padded with zeros; only these are read."""
        if name in self._given:
            part = self._given[name].flatten()[start : start + size]
        else:
            files, plain = self._source(name)
            with safe_open(files[plain], framework="pt") as file:
                mapped = file.get_tensor(plain).flatten()
                part = mapped[start : start + size].to(torch.float32, copy=True)
        return nn.functional.pad(part, (0, size - len(part)))

    def _source(self, name: str) -> tuple[Mapping[str, Path], str]:
        """(files, Hugging Face name in them) of a parameter; a branch has a checkpoint of its own."""
        if not name.startswith("branches."):
            return self._files, hugging_face_name(name)
        _, number, part = name.split(".", 2)
        first, files = self._branches[int(number)]
        if part.startswith("layers."):
            _, layer, rest = part.split(".", 2)
            return files, f"{self._parts.layers}.{first + int(layer)}.{rest}"
        return files, f"{self._parts.norm}.{part.removeprefix('norm.')}"

    def embedding(self) -> Tensor:
        """The whole embedding, for the last pipeline stage of a tied model."""
        return read_tensor(self._files, f"{self._parts.embeddings}.weight")

    def buffer(self, name: str) -> Tensor | None:
        """The buffer `name`; None if it is not in the checkpoint."""
        return read_tensor(self._files, hugging_face_name(name)) if name in self._buffers else None


def skeleton_of(checkpoint: Path) -> nn.Module:
    """The causal LM of a checkpoint without its weights.

    With weights if they are not in safetensors files under the model's own names, since only transformers can rename
    them.

    Raises:
        ValueError: the files hold a tensor that the model lacks. It would be published as it is, beside trained ones.
    """
    lm, files = skeleton(str(checkpoint)), weight_files(checkpoint)
    if strange := files.keys() - saved_shapes(lm).keys():
        raise ValueError(f"{checkpoint}: holds {min(strange)}, which no {type(lm).__name__} like this one has")
    parameters, buffers = _to_read(lm)
    return lm if parameters | buffers <= files.keys() else load_model(checkpoint)


def load_shard(
    module: HeadedLM,
    weights: Weights,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    partition: Partition | None = None,
    *,
    frozen: bool = False,
) -> None:
    """Load the parameters of `module` in `dtype` and its buffers onto `device`. `partition` leaves every rank its share
    of a parameter, which the rank reads by itself where it can.

    A `frozen` model in float32 on a CPU stays on the mapped pages of its checkpoint, so that all processes of a machine
    that score with it hold one copy; each pass checks that the files did not change (`MappedFiles`).
    """
    mapped = frozen and device.type == "cpu" and dtype == torch.float32 and partition is None
    first = partition is None or dist.get_rank() == 0
    places: dict[int, list[tuple[Any, str]]] = {}
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            # Grouped by identity, so that tied parameters stay tied.
            places.setdefault(id(parameter), []).append((owner, key))
    for name in [name for name, _ in module.named_parameters()]:
        old = module.get_parameter(name)
        shared = partition is not None and partition.by_share and old.is_meta and old.numel() > SMALL
        if first and not shared:
            value = (weights.value(name, mapped=mapped) if old.is_meta else old.detach()).to(dtype)
        else:
            value = torch.empty(old.shape, dtype=dtype)
        new = nn.Parameter(value.to(device), requires_grad=old.requires_grad and not mapped)
        # AutoTP stores attributes on parameters.
        new.__dict__ |= old.__dict__
        if partition is not None:
            partition(new, functools.partial(weights.share, name) if shared else None)
        for owner, key in places[id(old)]:
            owner._parameters[key] = new
        part_done()
    head = module.lm.get_output_embeddings()
    if isinstance(head, BorrowedHead):
        value = weights.embedding() if head.weight.is_meta else head.weight.detach()
        # Beside adapters nothing reads its gradient.
        head.weight = value.to(device).requires_grad_(module.adapters is None)
    load_buffers(module, weights, device)
    if mapped:
        module.register_forward_hook(lambda *_: weights.mapped.check_unchanged())


def load_buffers(module: nn.Module, weights: Weights, device: torch.device) -> None:
    """Bring the buffers of `module` onto `device`, with the values of those that the checkpoint holds."""
    for name, buffer in module.named_buffers():
        read_one = weights.buffer(name)
        buffer.data = (buffer if read_one is None else read_one.to(buffer.dtype)).to(device)


def _to_read(module: nn.Module) -> tuple[set[str], set[str]]:
    """(parameters on the meta device, buffers in checkpoints); empty for a model with all its values."""
    parameters = {name for name, parameter in module.named_parameters() if parameter.is_meta}
    held = module.state_dict()
    return parameters, {name for name, _ in module.named_buffers() if name in held and parameters}
