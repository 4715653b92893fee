"""Weights on their way from a trainer to generators, through Ray's object store ("plasma").

The trainer packs its tensors into buckets, each one contiguous array in the object store; on the same machine readers
map it without a copy. Order of a sync:

1. the trainer exports `version`: gather, pack, checksum every tensor, `ray.put`;
2. each generator maps every bucket and verifies *all* checksums, before it touches its weights;
3. only then are the weights loaded and the generator's version becomes `version`.

A transfer that fails in 1 or 2 leaves the generator wholly as it was, and can simply be tried again.
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
"""Bound on the extra memory one bucket takes while it is packed (a larger tensor gets a bucket of its own)."""

ALIGNMENT = 64


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
    """Put `tensors` into the object store, bucket by bucket."""
    buckets: list[Bucket] = []
    pending: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and size + num_bytes > BUCKET_BYTES:
            buckets.append(_put(pending))
            pending, size = [], 0
        pending.append((name, tensor.detach().cpu().clone()))
        size += num_bytes
    if pending:
        buckets.append(_put(pending))
    return WeightUpdate(version, tuple(buckets))


def _put(tensors: list[tuple[str, torch.Tensor]]) -> Bucket:
    import ray

    offset, places = 0, []
    for _, tensor in tensors:
        places.append(offset)
        offset += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    packed = np.empty(offset, dtype=np.uint8)
    entries = []
    for (name, tensor), start in zip(tensors, places, strict=True):
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        packed[start : start + raw.size] = raw
        checksum = xxhash.xxh3_128_hexdigest(raw.data)
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), start, raw.size, checksum))
    return Bucket(ray.put(packed), tuple(entries))


def unpack(bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    """The bucket's tensors as read-only views of the mapped memory, each verified as it is handed out.

    Raises:
        WeightTransferError: a tensor's bytes do not match its checksum, or its size does not match its shape.
    """
    import ray

    packed = ray.get(bucket.ref)
    with warnings.catch_warnings():
        # The mapped memory is read-only and torch says so; loaders only read it.
        warnings.simplefilter("ignore", UserWarning)
        mapped = torch.from_numpy(packed)
    for entry in bucket.entries:
        raw = packed[entry.offset : entry.offset + entry.num_bytes]
        arrived = xxhash.xxh3_128_hexdigest(raw.data)
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
