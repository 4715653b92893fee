"""Safetensors files written one tensor at a time, also by several processes: none holds the whole model to save it.

https://github.com/huggingface/safetensors#format: 8 bytes of header length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from xray_runtime.algorithms.finite import all_finite
from xray_runtime.kernel.errors import NonFiniteError
from xray_runtime.kernel.signs import part_done

WEIGHTS_FILE = "model.safetensors"
"""All weights of a checkpoint in Hugging Face form."""
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def create(path: Path, shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str]) -> None:
    """A file with room for float32 tensors of these shapes, still zeros; laid out as safetensors itself does."""
    head, places = float32_header(dict(sorted(shapes.items())), metadata)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(max((span.stop for span in places.values()), default=len(head)))


def float32_header(
    shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, range]]:
    """(beginning of a file of float32 tensors of these shapes, in this order; the bytes of each in the file)."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    spans, end = dict[str, tuple[int, int]](), 0
    for name, shape in shapes.items():
        spans[name] = end, end + 4 * torch.Size(shape).numel()
        end = spans[name][1]
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": spans[name]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {n: range(first + a, first + b) for n, (a, b) in spans.items()}


def check_file(path: Path, where: str) -> None:
    """Check each tensor of a safetensors file. Raises NonFiniteError, beginning with `where`, if one has numbers that
    are not finite."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118, it is no dict
            if not all_finite(file.get_tensor(name)):
                raise NonFiniteError(f"{where}: {name} has numbers that are not finite")
            part_done()


class TensorFile(AbstractContextManager["TensorFile"]):
    """A whole safetensors file whose tensors are overwritten in place."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, os.open(path, os.O_RDWR)
        size = int.from_bytes(os.pread(self._file, 8, 0), "little")
        self._header = json.loads(os.pread(self._file, size, 8))
        self._start = 8 + size

    def __exit__(self, *error: object) -> None:
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
