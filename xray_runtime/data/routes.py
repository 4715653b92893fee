"""Routes: the experts of a mixture that a generator chose for each token, in its order, and their weights.

Row t of a sequence of T tokens has the experts through which its token t went. The last token went through none, since
it was sampled and never read: its experts are `unknown`, and a model that replays the routes chooses its own. Weights
are those with which the generator summed its experts' outputs.

    L  layers with experts       K  experts of a token in a layer
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Routes(NamedTuple):
    """The routes of one sequence, without its last token."""

    ids: np.ndarray
    """[T − 1, L, K] uint8, or uint16 of more than 255 experts."""
    weights: np.ndarray
    """[T − 1, L, K] float32."""

    def first(self, count: int) -> Routes:
        """The routes of the first `count` tokens."""
        return Routes(self.ids[:count], self.weights[:count])


def id_type(num_experts: int) -> np.dtype:
    """The type of ids; its largest value is `unknown`."""
    return np.dtype(np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.uint16)


def unknown(dtype: np.dtype) -> int:
    """The id that says that an expert is not known."""
    return int(np.iinfo(dtype).max)
