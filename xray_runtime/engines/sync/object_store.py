"""Transfer weights from a trainer to generators: in shared memory on one machine, else in Ray's object store.

Trainer ranks pack their tensors into buckets, contiguous arrays that readers on their machine map without a copy. Ranks
that hold parts of the same tensors divide the buckets, so that each packs, checksums and publishes its share. Order of
a sync:

1. the trainer exports `version`: its ranks gather one tensor at a time, and the one whose bucket it is packs it;
2. the generator's ranks verify *all* checksums before they change their weights; those on one node divide the buckets;
3. only then are the weights loaded, of which each rank reads its slices, and the generator's version becomes `version`.

A failure in 1 or 2 leaves the generator unchanged; `versioned.py` handles failures in 3. The transfer can be repeated.
Extra memory: one layer in the generator; the whole update, and the one before, to revert to, in shares of the trainer's
ranks; with the object store, one bucket in each of them.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from xray_runtime.engines.sync.shared_memory import SharedBytes, SharedReader, SharedWriter

BUCKET_BYTES = 64 * 2**20
"""Largest bucket (a larger tensor gets its own one), and thus the extra memory for packing."""

ALIGNMENT = 64
GET_SECONDS = 300.0
"""Time for a bucket to arrive before it counts as lost."""


class WeightTransferError(RuntimeError):
    """Weights were lost or changed on their way."""


@dataclass(frozen=True)
class TensorEntry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    checksum: str
    """xxh3-128 of the tensor's bytes."""


@dataclass(frozen=True)
class Bucket:
    """Tensors packed into one array of bytes: `SharedBytes`, or a reference to the object store."""

    ref: Any
    entries: tuple[TensorEntry, ...]
    place: int
    """Its number among the buckets of all ranks that divide them."""


@dataclass(frozen=True)
class WeightUpdate:
    """The weights of policy version `version`."""

    version: int
    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for bucket in self.buckets for entry in bucket.entries)

    @property
    def digest(self) -> str:
        """Digest of the names and bytes of its tensors, independent of packing."""
        entries = sorted((e.name, e.dtype, e.shape, e.checksum) for bucket in self.buckets for e in bucket.entries)
        return hashlib.sha256(repr(entries).encode()).hexdigest()


class ObjectStore:
    """Ray's object store as a `SharedWriter`. It copies, so one bucket's memory is enough for an update."""

    def begin(self) -> None:
        self._packed = np.empty(0, dtype=np.uint8)

    def take(self, num_bytes: int) -> np.ndarray:
        if num_bytes > self._packed.size:
            self._packed = np.empty(num_bytes, dtype=np.uint8)
        return self._packed

    def put(self, num_bytes: int) -> Any:
        import ray

        return ray.put(self._packed[:num_bytes])


Memory = ObjectStore | SharedWriter


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]],
    version: int,
    memory: Memory | None = None,
    dtype: str | None = None,
    turn: tuple[int, int] = (0, 1),
) -> WeightUpdate:
    """Pack `tensors`, which are gathered one by one, into buckets in `memory` (None: the object store).

    Args:
        dtype: type of the packed tensors; None: their own.
        turn: (number, count) of this rank among those that call this with the same tensors. Each bucket is packed by
            the rank that has fewest bytes until then, so none has more than its share and one bucket.
    """
    memory = memory or ObjectStore()
    memory.begin()
    number, num_ranks = turn
    shares, packer, place = [0] * num_ranks, 0, -1
    buckets: list[Bucket] = []
    entries: list[TensorEntry] = []
    packed = np.empty(0, dtype=np.uint8)
    offset = 0
    for name, tensor in tensors:
        packed_as = tensor.dtype if dtype is None else getattr(torch, dtype)
        size = tensor.numel() * packed_as.itemsize
        space = -(-size // ALIGNMENT) * ALIGNMENT
        if place < 0 or offset + space > BUCKET_BYTES:
            if entries:
                buckets.append(Bucket(memory.put(offset), tuple(entries), place))
            packer, place = shares.index(min(shares)), place + 1
            entries, offset = [], 0
            if packer == number:
                packed = memory.take(max(BUCKET_BYTES, space))
        if packer == number:
            raw = packed[offset : offset + size]
            torch.from_numpy(raw).view(packed_as).view(tensor.shape).copy_(tensor.detach())
            checksum = xxhash.xxh3_128_hexdigest(raw.data)
            dtype_name = str(packed_as).removeprefix("torch.")
            entries.append(TensorEntry(name, dtype_name, tuple(tensor.shape), offset, size, checksum))
        offset += space
        shares[packer] += space
    if entries:
        buckets.append(Bucket(memory.put(offset), tuple(entries), place))
    return WeightUpdate(version, tuple(buckets))


def unpack(
    bucket: Bucket, shared: SharedReader | None = None, *, check: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """The bucket's tensors as read-only views of the mapped memory, each verified if `check` is set. `shared` maps
    buckets in shared memory, and keeps the views valid. Raises WeightTransferError: the bucket is lost, or a tensor's
    bytes do not match its checksum or shape."""
    packed = _packed(bucket, shared)
    with warnings.catch_warnings():
        # torch warns that the memory is read-only; loaders only read it.
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


def verify(update: WeightUpdate, shared: SharedReader | None = None, number: int = 0, checkers: int = 1) -> None:
    """Verify every `checkers`-th bucket of `update` from the one `number` on. Raises WeightTransferError."""
    for bucket in update.buckets[number::checkers]:
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
