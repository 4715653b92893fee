"""A trained model on disk, independent of its layout: whole float32 tensors by Hugging Face name.

A snapshot is one or more safetensors files (one for each pipeline stage) with `weight/NAME`, `exp_avg/NAME` and
`exp_avg_sq/NAME`, and the number of optimizer steps in the metadata. Tensors are written and read one at a time, and
each rank only reads its slice of a split tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from safetensors import safe_open
from torch import Tensor

from xray_runtime.algorithms.finite import all_finite
from xray_runtime.errors import NonFiniteError
from xray_runtime.models.tensor_file import TensorFile, create

if TYPE_CHECKING:
    from xray_runtime.engines.training.tensor import Split

WEIGHT = "weight"


def hugging_face_name(name: str) -> str:
    """A `HeadedLM` parameter's name in its causal LM's checkpoint; names of the scalar head stay `scalar.…`.

    peft calls a layer with a LoRA adapter `base_layer`.
    """
    return name.removeprefix("lm.").replace(".base_layer.", ".")


def write(
    file: Path | None,
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Iterable[str],
    step: int,
    tensors: Iterable[tuple[str, str, Tensor]],
) -> None:
    """Write (kind, name, tensor)s one by one; without `file` only take part in gathering them.

    Raises:
        NonFiniteError: a tensor has numbers that are not finite.
    """
    tensors = _checked(tensors)
    if file is None:
        for _ in tensors:
            pass
        return
    create(file, {f"{kind}/{name}": shape for kind in kinds for name, shape in shapes.items()}, {"step": str(step)})
    with TensorFile(file) as out:
        for kind, name, tensor in tensors:
            out.write(f"{kind}/{name}", tensor)


def _checked(tensors: Iterable[tuple[str, str, Tensor]]) -> Iterator[tuple[str, str, Tensor]]:
    for kind, name, tensor in tensors:
        if not all_finite(tensor):
            raise NonFiniteError(f"the {kind} {name} has numbers that are not finite: no snapshot is made")
        yield kind, name, tensor


class Reader:
    """The tensors of all files of a snapshot."""

    def __init__(self, directory: Path) -> None:
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        self.step = 0
        for path in sorted(directory.glob("*.safetensors")):
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            self.step = int(file.metadata()["step"])
            self._files |= dict.fromkeys(file.keys(), file)
        if not self._files:
            raise FileNotFoundError(f"{directory}: has no snapshot of a model")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def part(self, kind: str, name: str, split: Split | None, tensor_rank: int) -> Tensor:
        """The tensor, or this tensor-parallel rank's slice of it."""
        key = f"{kind}/{name}"
        if key not in self._files:
            raise ValueError(f"the snapshot has no {key}: it is of another model")
        return slice_for(self._files[key].get_slice(key), split, tensor_rank)


def slice_for(whole: Any, split: Split | None, tensor_rank: int) -> Tensor:
    """The tensor of safetensors' slice `whole`, or this tensor-parallel rank's part, which is all that is read."""
    if split is None:
        part: Tensor = whole[:]
        return part
    start = sum(split.sizes[:tensor_rank])
    piece = slice(start, start + split.sizes[tensor_rank])
    part = whole[piece] if split.dim == 0 else whole[:, piece]
    return part
