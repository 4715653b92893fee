"""A set of texts in 16 bytes per text."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash

DIGEST = np.dtype("S16")
"""xxh3-128. Two different texts of a trillion share one with a probability of 10⁻¹⁵."""


class TextSet:
    """A set of texts that supports adding and lookup, not iteration."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._added = bytearray()
        self._sorted: np.ndarray | None = None
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        self._added += xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))
        self._sorted = None

    def __len__(self) -> int:
        """The number of distinct texts."""
        return len(self._digests())

    def __contains__(self, text: str) -> bool:
        digests, digest = self._digests(), TextSet([text])._digests()
        index = int(np.searchsorted(digests, digest)[0])
        return index < len(digests) and bool(digests[index] == digest[0])

    def _digests(self) -> np.ndarray:
        if self._sorted is None:
            self._sorted = np.unique(np.frombuffer(bytes(self._added), DIGEST))
        return self._sorted
