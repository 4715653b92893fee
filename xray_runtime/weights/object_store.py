"""Weights on their way from a trainer to generators: in memory they share on one machine, else by Ray's object store.

The trainer packs its tensors into buckets, each one contiguous array, which readers on that machine map without a copy.
Order of a sync:

1. the trainer exports `version`: gather a tensor, pack it, checksum it, publish what fills a bucket;
2. each generator maps every bucket and verifies *all* checksums, before it touches its weights;
3. only then are the weights loaded and the generator's version becomes `version`.

A transfer that fails in 1 or 2 leaves the generator wholly as it was; `versioned.py` sees to 3. Either way it can be
tried again. Extra memory: the layer being laid out in the generator; the update itself, which has to lie there whole
before any of it may be loaded, and the one before, to go back to; by the object store, one bucket in the trainer.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from xray_runtime.weights.shared_memory import SharedBytes, SharedReader

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
    """Tensors packed into one array of bytes: `SharedBytes`, or a reference into the object store."""

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

    @property
    def digest(self) -> str:
        """One digest over the names and bytes of its tensors, however they are packed."""
        entries = sorted((e.name, e.dtype, e.shape, e.checksum) for bucket in self.buckets for e in bucket.entries)
        return hashlib.sha256(repr(entries).encode()).hexdigest()


class Memory(Protocol):
    """Where a trainer packs buckets."""

    def begin(self) -> None:
        """An update follows."""

    def take(self, num_bytes: int) -> np.ndarray:
        """Memory of `num_bytes` or more for a bucket."""

    def put(self, num_bytes: int) -> Any:
        """Publish the first `num_bytes` of what was taken last; where readers find them."""


class ObjectStore:
    """Ray's: it copies, so one bucket's memory serves all of an update."""

    def begin(self) -> None:
        self._packed = np.empty(0, dtype=np.uint8)

    def take(self, num_bytes: int) -> np.ndarray:
        if num_bytes > self._packed.size:
            self._packed = np.empty(num_bytes, dtype=np.uint8)
        return self._packed

    def put(self, num_bytes: int) -> Any:
        import ray

        return ray.put(self._packed[:num_bytes])


def pack(tensors: Iterable[tuple[str, torch.Tensor]], version: int, memory: Memory | None = None) -> WeightUpdate:
    """Put `tensors` into `memory` (None: the object store), bucket by bucket.

    Beside that memory it takes no other for tensors that are gathered one by one; the object store takes a bucket.
    """
    memory = memory or ObjectStore()
    memory.begin()
    buckets: list[Bucket] = []
    entries: list[TensorEntry] = []
    packed = np.empty(0, dtype=np.uint8)
    offset = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        space = -(-size // ALIGNMENT) * ALIGNMENT
        if entries and offset + space > BUCKET_BYTES:
            buckets.append(Bucket(memory.put(offset), tuple(entries)))
            entries, offset = [], 0
        if not entries:
            packed = memory.take(max(BUCKET_BYTES, space))
        raw = packed[offset : offset + size]
        torch.from_numpy(raw).view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), offset, size, xxhash.xxh3_128_hexdigest(raw.data)))
        offset += space
    if entries:
        buckets.append(Bucket(memory.put(offset), tuple(entries)))
    return WeightUpdate(version, tuple(buckets))


def unpack(
    bucket: Bucket, shared: SharedReader | None = None, *, check: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """The bucket's tensors as read-only views of the mapped memory, each verified (`check`) as it is handed out.

    Args:
        shared: maps buckets in shared memory; keeps the views valid.

    Raises:
        WeightTransferError: the bucket is lost, a tensor's bytes do not match its checksum, or its size does not match
            its shape.
    """
    packed = _packed(bucket, shared)
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


def verify(update: WeightUpdate, shared: SharedReader | None = None) -> None:
    """Check every tensor of `update` as it arrived here. Raises WeightTransferError."""
    for bucket in update.buckets:
        for _ in unpack(bucket, shared):
            pass


def _packed(bucket: Bucket, shared: SharedReader | None) -> np.ndarray:
    import ray

    try:
        if isinstance(bucket.ref, SharedBytes):
            assert shared is not None
            return shared.read(bucket.ref)
        packed: np.ndarray = ray.get(bucket.ref, timeout=GET_SECONDS)
        return packed
    except (ray.exceptions.RayError, OSError) as error:
        first = bucket.entries[0].name
        raise WeightTransferError(f"weights from {first} on are lost ({type(error).__name__})") from error
