"""Near-duplicates among texts: MinHash finds candidates (Broder 1997), their exact Jaccard similarity decides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from xray_runtime.data.spans import words_of

GRAM = 4
"""Characters in a shingle, of the words without case and punctuation."""
BANDS, ROWS = 16, 4
"""Two texts are compared if one band of their signatures is equal: with similarity 0.8, all but 0.02 % are."""
_MULTIPLIERS = np.random.default_rng(0).integers(1, 2**63, BANDS * ROWS, dtype=np.uint64) | np.uint64(1)
_MIX = np.uint64(29)


def leaders(texts: Sequence[str], threshold: float) -> list[int]:
    """For each text the index of the first text that it nearly equals, which is its own if there is none; `threshold`
    is the least Jaccard similarity of the shingles."""
    shingles = [_shingles(text) for text in texts]
    buckets: dict[tuple[int, bytes], list[int]] = {}
    numbers: list[int] = []
    for number, shingle in enumerate(shingles):
        keys = list(enumerate(_bands(shingle)))
        candidates = sorted({other for key in keys for other in buckets.get(key, ())})
        leader = next((other for other in candidates if _similarity(shingle, shingles[other]) >= threshold), number)
        numbers.append(leader)
        if leader == number:
            for key in keys:
                buckets.setdefault(key, []).append(number)
    return numbers


def _shingles(text: str) -> np.ndarray:
    """Distinct sorted hashes [S], S ≥ 1."""
    plain = " ".join(words_of(text)) or text
    grams = {plain[start : start + GRAM] for start in range(max(1, len(plain) - GRAM + 1))}
    hashes = (xxhash.xxh3_64_intdigest(gram.encode("utf-8", "surrogatepass")) for gram in grams)
    return np.sort(np.fromiter(hashes, np.uint64, len(grams)))


def _bands(shingles: np.ndarray) -> list[bytes]:
    """The bands of a text's MinHash signature."""
    mixed = shingles[:, None] * _MULTIPLIERS
    signature = (mixed ^ (mixed >> _MIX)).min(axis=0)
    return [band.tobytes() for band in signature.reshape(BANDS, ROWS)]


def _similarity(a: np.ndarray, b: np.ndarray) -> float:
    both = len(np.intersect1d(a, b, assume_unique=True))
    return both / (len(a) + len(b) - both)
