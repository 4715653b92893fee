"""The likeliest tokens at each place of a reply, as the sampler that drew the reply saw them.

Their log-probabilities are those of the distribution that it drew from: at the sampling temperature, over the tokens
that `top_k`, `top_p` and `min_p` left, the *kept set*; over the whole vocabulary by default.

    R  tokens of a reply     K  tokens that an engine reports at each place: fewer only where the vocabulary has fewer
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xray_runtime.algorithms.logprobs import NO_LOGPROB
from xray_runtime.data.ragged import Ragged

NO_TOKEN = -1
"""Id of what fills up the likeliest tokens where fewer are left."""


class TopTokens(NamedTuple):
    """Those of one reply."""

    ids: np.ndarray
    """[R, K] int32, the likeliest first."""
    logprobs: np.ndarray
    """[R, K] float32; −∞ outside the kept set."""

    def first(self, count: int) -> TopTokens:
        """Those of the first `count` tokens."""
        return TopTokens(self.ids[:count], self.logprobs[:count])


def top_columns(
    replies: Sequence[TopTokens | None], lengths: Sequence[int], reported: int, top: int, *, kept: bool
) -> dict[str, Ragged]:
    """Columns of replies of `lengths`: the `top` likeliest tokens, and with `kept` the kept sets.

    Raises RuntimeError: those of a token are missing, or more tokens are kept than were `reported`.
    """
    known = [found for found in replies if found is not None]
    if [len(found.ids) for found in known] != list(lengths):
        raise RuntimeError("the generator did not return the likeliest tokens at every place")
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    ids, logprobs = (np.concatenate([found[part] for found in known]) for part in range(2))
    there = np.isfinite(logprobs)
    columns = {}
    if top:
        ids_of_top = np.where(there, ids, NO_TOKEN)[:, :top].astype(np.int32)
        columns["topk_ids"] = Ragged(ids_of_top, offsets)
        columns["topk_logprobs"] = Ragged(np.where(there, logprobs, NO_LOGPROB)[:, :top].astype(np.float32), offsets)
    if kept:
        if ids.shape[1] == reported and there[:, -1].any():
            raise RuntimeError(f"the generator kept {reported} tokens or more at a place: lower top_k")
        counts = there.sum(-1, dtype=np.int32)
        ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])[offsets]
        columns["kept_counts"] = Ragged(counts, offsets)
        # In order of ids, which the order of equal logits cannot change.
        rows, places = np.nonzero(there)
        chosen = ids[rows, places]
        columns["kept_ids"] = Ragged(chosen[np.lexsort((chosen, rows))].astype(np.int32), ends)
    return columns
