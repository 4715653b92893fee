"""One text in the tokens of two vocabularies: which tokens of each cover the same characters.

    student   hel  lo      th  ere          chunks   0 0 1 2 2
    teacher   hello  ' '   t  he  re        chunks   0   1 2 2 2

A chunk lies between two places at which tokens of both end, and has no such place inside. Chunks of both have the same
text, so the sums of their log-probabilities are of the same event, read as these tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xray_runtime.data.tokenizer import Tokenizer


class Aligned(NamedTuple):
    """A reply in the tokens of another vocabulary."""

    ids: list[int]
    """The other's tokens [M]."""
    own_chunks: np.ndarray
    """The chunk of each own token [N]."""
    chunks: np.ndarray
    """The chunk of each of the other's tokens [M]."""

    def spread(self, own: np.ndarray, other: np.ndarray) -> np.ndarray:
        """The other's log-probabilities [M] as those of the own tokens [N]: the difference to the own ones of a chunk
        is shared by its tokens alike."""
        sums, sizes = np.bincount(self.own_chunks, own.astype(np.float64)), np.bincount(self.own_chunks)
        of_other = np.bincount(self.chunks, other.astype(np.float64))
        shared = own + ((of_other - sums) / sizes)[self.own_chunks]
        # Nothing is rounded where a chunk has one own token.
        return np.where(sizes[self.own_chunks] == 1, of_other[self.own_chunks], shared).astype(np.float32)


def aligned(
    own: Tokenizer, own_ids: Sequence[int], other: Tokenizer, other_ids: Sequence[int], *, num_ends: int
) -> Aligned | None:
    """The chunks of a reply whose last `num_ends` tokens end the turn in both; None: they are not the same text, or it
    has U+FFFD, which stands for bytes that are no character, and would be read as the character itself."""
    texts = len(own_ids) - num_ends, len(other_ids) - num_ends
    (text, own_ends), (its_text, ends) = _ends(own, own_ids[: texts[0]]), _ends(other, other_ids[: texts[1]])
    if text != its_text or "\ufffd" in text or bool(texts[0]) != bool(texts[1]):
        return None
    if min(texts) and (own_ends[-1] < 0 or ends[-1] < 0):
        return None
    common = np.intersect1d(own_ends[own_ends >= 0], ends[ends >= 0])
    return Aligned(list(other_ids), _chunks(own_ends, common, num_ends), _chunks(ends, common, num_ends))


def _chunks(ends: np.ndarray, common: np.ndarray, num_ends: int) -> np.ndarray:
    ended = np.concatenate([np.isin(ends, common), np.ones(num_ends, bool)])
    chunks: np.ndarray = np.cumsum(ended) - ended
    return chunks


def _ends(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, np.ndarray]:
    """(text, number of its characters up to the end of each token; −1: it ends within a character)."""
    from tokenizers.decoders import DecodeStream

    stream, text, ends = DecodeStream(skip_special_tokens=False), "", list[int]()
    for token in ids:
        piece = stream.step(tokenizer.backend_tokenizer, int(token))
        text += piece or ""
        ends.append(len(text) if piece else -1)
    return text, np.array(ends, np.int64)
