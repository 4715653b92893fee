"""The digest of weights that are sent: of names and bytes, not of how they are packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from xray_runtime.engines.sync import object_store
from xray_runtime.engines.sync.object_store import ObjectStore, WeightUpdate, pack


class Kept(ObjectStore):
    """Memory for buckets that nobody reads."""

    def take(self, num_bytes: int) -> np.ndarray:
        return np.empty(num_bytes, dtype=np.uint8)

    def put(self, num_bytes: int) -> None: ...


def packed(tensors: dict[str, torch.Tensor], version: int = 1) -> WeightUpdate:
    return pack(tensors.items(), version, Kept())


def test_the_digest_is_of_names_shapes_and_bytes_alone() -> None:
    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(4, dtype=torch.bfloat16)
    digest = packed({"a": a, "b": b}).digest
    assert packed({"b": b, "a": a}, version=7).digest == digest
    # As it comes from two stages of a pipeline.
    parts = packed({"a": a}), packed({"b": b})
    assert WeightUpdate(1, tuple(bucket for part in parts for bucket in part.buckets)).digest == digest
    changed = a.clone()
    changed[1, 2] = torch.nextafter(a[1, 2], torch.tensor(9.0))
    others = [{"a": changed, "b": b}, {"a": a.reshape(3, 2), "b": b}, {"c": a, "b": b}, {"a": a}]
    assert len({digest, *(packed(other).digest for other in others)}) == 5


def test_ranks_divide_the_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large and small buckets take turns, which would give one of two ranks all large ones by number alone."""
    monkeypatch.setattr(object_store, "BUCKET_BYTES", 4096)
    sizes = [1000, 10] * 20 + [3000]
    tensors = {f"w{n}": torch.full((size,), float(n)) for n, size in enumerate(sizes)}
    whole = packed(tensors)
    for count in (2, 3, 5):
        shares = [pack(tensors.items(), 1, Kept(), turn=(number, count)) for number in range(count)]
        buckets = sorted((bucket for share in shares for bucket in share.buckets), key=lambda bucket: bucket.place)
        assert [(b.place, b.entries) for b in buckets] == [(b.place, b.entries) for b in whole.buckets]
        assert WeightUpdate(1, tuple(buckets)).digest == whole.digest
        largest = 4 * 3000  # a tensor over a bucket's size has its own
        assert max(share.num_bytes for share in shares) <= whole.num_bytes / count + largest


def test_a_rank_packs_nothing_of_its_peers() -> None:
    class Noted(Kept):
        taken = 0

        def take(self, num_bytes: int) -> np.ndarray:
            self.taken += 1
            return super().take(num_bytes)

    memory = Noted()
    assert pack([("a", torch.ones(3))], 1, memory, turn=(1, 2)).buckets == ()
    assert memory.taken == 0
