"""Safetensors files written one tensor at a time, also by several processes: nobody holds the whole model to save it.

https://github.com/huggingface/safetensors#format: 8 bytes of header length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from xray_runtime.algorithms.finite import all_finite
from xray_runtime.errors import NonFiniteError

WEIGHTS_FILE = "model.safetensors"
"""All weights of a checkpoint in Hugging Face form."""
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def create(path: Path, shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str]) -> None:
    """A file with room for float32 tensors of these shapes, still zeros."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def copy_tensors(source: Path, target: Path, names: Iterable[str]) -> None:
    """Overwrite the tensors `names` of one safetensors file by those of another, one at a time."""
    with safe_open(source, framework="pt") as read, TensorFile(target) as written:
        for name in names:
            written.write(name, read.get_tensor(name))


def same_trunk(one: Path, other: Path, top_layers: int) -> bool:
    """Whether two checkpoints differ in nothing but the weights of `top_layers` upper layers and the final norm."""
    if one == other:
        return True
    config, other_config = (json.loads((directory / "config.json").read_text()) for directory in (one, other))
    if config != other_config:
        return False
    above = _above_trunk(config, top_layers)
    with safe_open(one / WEIGHTS_FILE, framework="pt") as a, safe_open(other / WEIGHTS_FILE, framework="pt") as b:
        names = {*a.keys()}
        return names == {*b.keys()} and all(
            torch.equal(a.get_tensor(name), b.get_tensor(name)) for name in sorted(names) if not name.startswith(above)
        )


def trunk_digest(directory: Path, top_layers: int) -> str:
    """Digest of a checkpoint's config and of all weights but those of `top_layers` upper layers and the final norm."""
    text = (directory / "config.json").read_text()
    above = _above_trunk(json.loads(text), top_layers)
    digest = xxhash.xxh3_128(text.encode())
    with safe_open(directory / WEIGHTS_FILE, framework="pt") as file:
        for name in sorted(file.keys()):
            if not name.startswith(above):
                digest.update(name.encode())
                digest.update(file.get_tensor(name).contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _above_trunk(config: dict[str, Any], top_layers: int) -> tuple[str, ...]:
    """Prefixes of the names of weights above a frozen trunk."""
    layers = config["num_hidden_layers"]
    return (*(f"model.layers.{n}." for n in range(layers - top_layers, layers)), "model.norm.")


def check_finite(directory: Path) -> None:
    """Look at every tensor of the safetensors files below `directory`, one at a time.

    Raises:
        NonFiniteError: one has numbers that are not finite.
    """
    for path in sorted(directory.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no dict
                if not all_finite(file.get_tensor(name)):
                    raise NonFiniteError(f"{path.relative_to(directory)}: {name} has numbers that are not finite")


class TensorFile:
    """A whole safetensors file whose tensors are overwritten in place."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, os.open(path, os.O_RDWR)
        size = int.from_bytes(os.pread(self._file, 8, 0), "little")
        self._header = json.loads(os.pread(self._file, size, 8))
        self._start = 8 + size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._file)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put `tensor` in its place.

        Raises:
            ValueError: the file has no tensor of this name, dtype and shape.
        """
        entry = self._header.get(name)
        found = {"dtype": NAMES.get(tensor.dtype), "shape": list(tensor.shape)}
        if entry is None or any(entry[key] != value for key, value in found.items()):
            raise ValueError(f"{self._path}: has no place for {name} {found}")
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        place = self._start + entry["data_offsets"][0]
        while raw:
            written = os.pwrite(self._file, raw, place)
            raw, place = raw[written:], place + written
