"""Weights on their way from a trainer to generators, through Ray's object store ("plasma").

The trainer packs its tensors into buckets, each one contiguous array in the object store; on the same machine readers
map it without a copy. Order of a sync:

1. the trainer exports `version`: gather a tensor, checksum it, pack it, `ray.put` what fills a bucket;
2. each generator maps every bucket and verifies *all* checksums, before it touches its weights;
3. only then are the weights loaded and the generator's version becomes `version`.

A transfer that fails in 1 or 2 leaves the generator wholly as it was; `held.py` sees to 3. Either way it can simply be
tried again. Extra memory: one bucket in the trainer, the layer being laid out in the generator, and in the object store
the update itself, which has to lie there whole before any of it may be loaded, and the one before, to go back to.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

BUCKET_BYTES = 64 * 2**20
"""Largest bucket (a larger tensor gets one of its own), and so the extra memory that packing takes."""

ALIGNMENT = 64
GET_SECONDS = 300.0
"""A bucket that has not arrived by then is lost."""


class WeightTransferError(RuntimeError):
    """Weights arrived that are not those that were sent."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor's place in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    checksum: str
    """xxh3-128 of the tensor's bytes."""


@dataclass(frozen=True)
class Bucket:
    """Tensors packed into one object-store array of bytes."""

    ref: Any
    entries: tuple[TensorEntry, ...]


@dataclass(frozen=True)
class WeightUpdate:
    """Everything a generator needs to hold policy version `version`."""

    version: int
    buckets: tuple[Bucket, ...] = field(default=())

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for bucket in self.buckets for entry in bucket.entries)


def pack(tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate:
    """Put `tensors` into the object store, bucket by bucket.

    Beside the object store it takes one bucket of memory, however many there are, and a copy of one tensor where that
    is not contiguous or not on the CPU.
    """
    import ray

    buckets: list[Bucket] = []
    packed = np.empty(0, dtype=np.uint8)
    entries: list[TensorEntry] = []
    offset = 0

    def put() -> None:
        nonlocal entries, offset
        if entries:
            # The object store copies, so the buffer is free for the next bucket.
            buckets.append(Bucket(ray.put(packed[:offset]), tuple(entries)))
        entries, offset = [], 0

    for name, tensor in tensors:
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        space = -(-raw.size // ALIGNMENT) * ALIGNMENT
        if offset + space > BUCKET_BYTES:
            put()
        if offset + space > packed.size:
            # The first buffer, or one for a tensor larger than a bucket.
            packed = np.empty(max(BUCKET_BYTES, space), dtype=np.uint8)
        packed[offset : offset + raw.size] = raw
        dtype = str(tensor.dtype).removeprefix("torch.")
        checksum = xxhash.xxh3_128_hexdigest(raw.data)
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), offset, raw.size, checksum))
        offset += space
    put()
    return WeightUpdate(version, tuple(buckets))


def unpack(bucket: Bucket, *, check: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """The bucket's tensors as read-only views of the mapped memory, each verified (`check`) as it is handed out.

    Raises:
        WeightTransferError: the bucket is lost, a tensor's bytes do not match its checksum, or its size does not match
            its shape.
    """
    import ray

    try:
        packed = ray.get(bucket.ref, timeout=GET_SECONDS)
    except ray.exceptions.RayError as error:
        raise WeightTransferError(
            f"weights from {bucket.entries[0].name} on are lost ({type(error).__name__})"
        ) from error
    with warnings.catch_warnings():
        # The mapped memory is read-only and torch says so; loaders only read it.
        warnings.simplefilter("ignore", UserWarning)
        mapped = torch.from_numpy(packed)
    for entry in bucket.entries:
        raw = packed[entry.offset : entry.offset + entry.num_bytes]
        arrived = xxhash.xxh3_128_hexdigest(raw.data) if check else entry.checksum
        if arrived != entry.checksum:
            raise WeightTransferError(f"weight {entry.name}: checksum {arrived} on arrival, {entry.checksum} when sent")
        dtype = getattr(torch, entry.dtype)
        if raw.size != int(np.prod(entry.shape)) * dtype.itemsize:
            raise WeightTransferError(f"weight {entry.name}: {raw.size} bytes do not fit shape {entry.shape}")
        yield entry.name, mapped[entry.offset : entry.offset + entry.num_bytes].view(dtype).reshape(entry.shape)


def verify(update: WeightUpdate) -> None:
    """Check every tensor of `update` as it arrived here. Raises WeightTransferError."""
    for bucket in update.buckets:
        for _ in unpack(bucket):
            pass
