"""The digest of weights that are sent: of names and bytes, not of how they are packed."""

from __future__ import annotations

import numpy as np
import torch

from xray_runtime.weights.object_store import WeightUpdate, pack


class Kept:
    """Memory for buckets that nobody reads."""

    def begin(self) -> None: ...

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
