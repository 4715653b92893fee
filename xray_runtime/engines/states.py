"""A trained model on disk in a form that knows no layout: whole float32 tensors under their Hugging Face names.

A snapshot is one or more safetensors files (each pipeline stage writes its own) with `weight/NAME`, `exp_avg/NAME` and
`exp_avg_sq/NAME`, and the number of optimizer steps in the metadata. Tensors are written and read one at a time, and of
a split tensor each rank reads only its slice.
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
    """A `HeadedLM` parameter's name in its causal LM's own checkpoint; the scalar head's stays `scalar.…`.

    A layer with a LoRA adapter beside it is peft's `base_layer`.
    """
    return name.removeprefix("lm.").replace(".base_layer.", ".")


def write(
    file: Path | None,
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Iterable[str],
    step: int,
    tensors: Iterable[tuple[str, str, Tensor]],
) -> None:
    """Write (kind, name, tensor)s as they come; with no `file` only take part in their gathering.

    Raises:
        NonFiniteError: one has numbers that are not finite.
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
            raise NonFiniteError(f"the {kind} {name} has numbers that are not finite, and no snapshot is made of it")
        yield kind, name, tensor


class Reader:
    """The tensors of a snapshot, whichever of its files they lie in."""

    def __init__(self, directory: Path) -> None:
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        self.step = 0
        for path in sorted(directory.glob("*.safetensors")):
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            self.step = int(file.metadata()["step"])
            self._files |= dict.fromkeys(file.keys(), file)
        if not self._files:
            raise FileNotFoundError(f"{directory}: there is no snapshot of a model")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def part(self, kind: str, name: str, split: Split | None, tensor_rank: int) -> Tensor:
        """The tensor, or this tensor-parallel rank's slice of it."""
        key = f"{kind}/{name}"
        if key not in self._files:
            raise ValueError(f"the snapshot has no {key}: it is of another model")
        return cut(self._files[key].get_slice(key), split, tensor_rank)


def cut(whole: Any, split: Split | None, tensor_rank: int) -> Tensor:
    """The tensor behind safetensors' slice `whole`, or this tensor-parallel rank's part of it; no more is read."""
    if split is None:
        part: Tensor = whole[:]
        return part
    start = sum(split.sizes[:tensor_rank])
    piece = slice(start, start + split.sizes[tensor_rank])
    part = whole[piece] if split.dim == 0 else whole[:, piece]
    return part
