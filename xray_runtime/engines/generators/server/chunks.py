"""The form in which weights travel to a server: JSON objects with a bounded number of bytes, in Base64.

A chunk holds pieces, consecutive bytes of one tensor each; a tensor larger than a chunk has several. The last piece
brings the checksum of the whole tensor, so that nothing is loaded that did not arrive as it was sent.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypedDict

import torch
import xxhash

CHUNK_BYTES = 16 * 2**20
"""Most bytes of weights in a chunk."""


class ByteRange(TypedDict):
    """Consecutive bytes of a tensor."""

    name: str
    dtype: str
    shape: list[int]
    num_bytes: int
    checksum: str
    """xxh3-128 of the tensor's bytes, in its last piece; before, empty."""


class Chunk(TypedDict):
    pieces: list[ByteRange]
    data: str
    """The bytes of all pieces, in Base64."""


def chunks(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """`tensors`, taken one at a time and converted to `dtype`, in chunks of at most `size` bytes."""
    pieces: list[ByteRange] = []
    data = bytearray()
    for name, tensor in tensors:
        raw = tensor.detach().to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data
        start = 0
        while start < len(raw):
            if len(data) == size:
                yield _chunk(pieces, data)
                pieces, data = [], bytearray()
            part = raw[start : start + size - len(data)]
            start += len(part)
            pieces.append(
                ByteRange(
                    name=name,
                    dtype=str(dtype).removeprefix("torch."),
                    shape=list(tensor.shape),
                    num_bytes=len(part),
                    checksum=xxhash.xxh3_128_hexdigest(raw) if start == len(raw) else "",
                )
            )
            data += part
    if pieces:
        yield _chunk(pieces, data)


def _chunk(pieces: list[ByteRange], data: bytearray) -> Chunk:
    return Chunk(pieces=pieces, data=base64.b64encode(data).decode("ascii"))


@dataclass
class _Arriving:
    piece: ByteRange
    data: bytearray
    """As long as the whole tensor."""
    num_bytes: int = 0
    """Bytes that have arrived."""


class Assembler:
    """Puts the pieces of tensors together, in the order in which they were sent."""

    def __init__(self) -> None:
        self._arriving: _Arriving | None = None

    def take(self, chunk: Chunk) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that `chunk` completes. Raises ValueError: a piece does not continue the one before, or a tensor
        does not have the bytes that were sent."""
        data, offset = base64.b64decode(chunk["data"], validate=True), 0
        for piece in chunk["pieces"]:
            part = data[offset : offset + piece["num_bytes"]]
            offset += piece["num_bytes"]
            arriving = self._arriving or _begin(piece)
            name, end = arriving.piece["name"], arriving.num_bytes + len(part)
            if piece["name"] != name or end > len(arriving.data):
                raise ValueError(f"weight {name}: a piece of {len(part)} bytes of {piece['name']} does not continue it")
            arriving.data[arriving.num_bytes : end] = part
            arriving.num_bytes, self._arriving = end, arriving
            if end == len(arriving.data):
                self._arriving = None
                yield name, _complete(arriving, piece["checksum"])

    def close(self) -> None:
        """Raises ValueError: a tensor has not arrived completely."""
        if self._arriving is not None:
            raise ValueError(f"weight {self._arriving.piece['name']}: only a part of it has arrived")


def _begin(piece: ByteRange) -> _Arriving:
    return _Arriving(piece, bytearray(math.prod(piece["shape"]) * _dtype(piece["dtype"]).itemsize))


def _complete(arrived: _Arriving, checksum: str) -> torch.Tensor:
    piece, found = arrived.piece, xxhash.xxh3_128_hexdigest(arrived.data)
    if found != checksum:
        raise ValueError(f"weight {piece['name']}: checksum {found} on arrival, {checksum} when sent")
    return torch.frombuffer(arrived.data, dtype=_dtype(piece["dtype"])).reshape(piece["shape"])


def _dtype(name: str) -> torch.dtype:
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"dtype {name!r} is not allowed: must be 'float32' or 'bfloat16'")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
