"""Overlap of texts by spans of 13 words, ignoring case and punctuation.

GPT-3's authors searched for benchmarks in its training data with 13 words (Brown et al. 2020, appendix C). A shorter
text only matches as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice

import numpy as np
import xxhash

SPAN_WORDS = 13
WORD = re.compile(r"\w+")
BATCH = 256
_BASE = np.uint64(0x9E3779B97F4A7C15)

Hashes = np.ndarray
"""Distinct sorted hashes of spans and whole texts, uint64. A search for a billion spans among 10⁵ has a false match
in one of 10⁵ runs."""


def words_of(text: str) -> list[str]:
    """The words by which texts are compared."""
    return WORD.findall(text.casefold())


class SpanSet:
    """The spans of texts that others should not contain, all in memory."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._ids: dict[str, int] = {}
        hashes = [self.hashes(text) for text in texts]
        self._all: Hashes = np.unique(np.concatenate(hashes)) if hashes else np.zeros(0, np.uint64)

    def hashes(self, text: str) -> Hashes:
        """Hashes of the spans of `text`; of a shorter text one hash of the whole, of a text without words none."""
        words = words_of(text)
        ids = np.fromiter((self._id(word) for word in words), np.uint64, len(words))
        if not words:
            return ids
        return np.unique(_windows(ids)) if len(words) >= SPAN_WORDS else np.array([_hash_whole(ids)])

    def found_in(self, texts: Iterable[str], wholes: Iterable[str] = ()) -> Hashes:
        """Which spans occur in `texts`, and which short texts equal one of `wholes`; both are streamed."""
        hashes = [np.zeros(0, np.uint64)]
        hashes += [self._of_ours(_windows(ids)) for ids in self._batches(texts)]
        short = (ids for ids in map(self._known, wholes) if 0 < len(ids) < SPAN_WORDS and ids.all())
        hashes.append(self._of_ours(np.fromiter(map(_hash_whole, short), np.uint64)))
        return np.unique(np.concatenate(hashes))

    def _batches(self, texts: Iterable[str]) -> Iterator[Hashes]:
        remaining = iter(texts)
        while batch := list(islice(remaining, BATCH)):
            # 0 is no word's id; it separates texts.
            parts = chain.from_iterable((self._known(text), np.zeros(1, np.uint64)) for text in batch)
            yield np.concatenate(list(parts))

    def _known(self, text: str) -> Hashes:
        """Ids of a text's words; 0 for unknown words."""
        words, ids = words_of(text), self._ids
        return np.fromiter((ids.get(word, 0) for word in words), np.uint64, len(words))

    def _id(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass")) or 1
        return self._ids[word]

    def _of_ours(self, hashes: Hashes) -> Hashes:
        if not len(self._all):
            return hashes[:0]
        position = np.minimum(np.searchsorted(self._all, hashes), len(self._all) - 1)
        known: np.ndarray = hashes[self._all[position] == hashes]
        return known


def _windows(ids: Hashes) -> Hashes:
    """Polynomial hashes of all runs of 13 ids without a 0."""
    count = len(ids) - SPAN_WORDS + 1
    if count <= 0:
        return ids[:0]
    hashes, whole = np.zeros(count, np.uint64), np.ones(count, bool)
    for offset in range(SPAN_WORDS):
        part = ids[offset : offset + count]
        hashes = hashes * _BASE + part
        whole &= part != 0
    windows: np.ndarray = hashes[whole]
    return windows


def _hash_whole(ids: Hashes) -> int:
    return xxhash.xxh3_64_intdigest(ids.tobytes(), seed=len(ids))
