"""Batches of rows: a resumable order over epochs, and micro-batches of similar length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np

from xray_runtime.data.permutation import permuted
from xray_runtime.seeding import derive_seed


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group row indices, longest rows first, so that rows × longest of each group are no more than `max_tokens`.

    Similar lengths need little padding. A row longer than `max_tokens` forms its own micro-batch. Deterministic; every
    index exactly once.
    """
    batches: list[list[int]] = []
    room = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        # Rows are padded to the first row of the batch, which is the longest.
        tokens = lengths[batches[-1][0]] if batches else lengths[i]
        if batches and tokens <= room:
            batches[-1].append(i)
            room -= tokens
        else:
            batches.append([i])
            room = max_tokens - lengths[i]
    return batches


def packed_micro_batches(
    lengths: Sequence[int], shared: Sequence[int], alike: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Group row indices so that each group computes no more than `max_tokens`, what its rows share counting once.

    Rows that share something stay together where they fit; the longest come first. As `micro_batches` otherwise.

    Args:
        lengths: tokens of each row.
        shared: how many of them the row shares with all rows that are `alike`.
        alike: for each row, the first row that shares with it.
    """
    groups: dict[int, list[int]] = {}
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        groups.setdefault(alike[i], []).append(i)
    batches: list[list[int]] = []
    room = 0
    for group in groups.values():
        whole = shared[group[0]] + sum(lengths[i] - shared[i] for i in group)
        begins = not batches or room < whole <= max_tokens
        new = True
        for i in group:
            tokens = lengths[i] - (0 if new else shared[i])
            if begins or tokens > room:
                batches.append([])
                room, tokens = max_tokens, lengths[i]
            batches[-1].append(i)
            room -= tokens
            begins = new = False
    return batches


@dataclass
class Cursor:
    """An endless iteration over `num_rows` rows, in a new seeded order each epoch or always in row order. The fields
    are its whole state."""

    num_rows: int
    seed: int
    epoch: int = 0
    position: int = 0
    shuffled: bool = True

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ValueError("there are no rows to draw from")
        if self.epoch < 0 or not 0 <= self.position < self.num_rows:
            raise ValueError(f"there is no position {self.position} of epoch {self.epoch} in {self.num_rows} rows")

    def take(self, n: int) -> list[int]:
        """The next `n` row indices; they continue into the next epoch if this one ends."""
        indices: list[int] = []
        while len(indices) < n:
            end = min(self.position + n - len(indices), self.num_rows)
            places = np.arange(self.position, end)
            if self.shuffled:
                places = permuted(places, self.num_rows, derive_seed(self.seed, "epoch", self.epoch))
            indices += places.tolist()
            self.epoch, self.position = (self.epoch + 1, 0) if end == self.num_rows else (self.epoch, end)
        return indices

    def ahead(self, n: int) -> np.ndarray:
        """The distinct rows among the next `n`, in ascending order."""
        if n >= 2 * self.num_rows:
            return np.arange(self.num_rows)
        return np.unique(replace(self).take(n))

    def state(self) -> dict[str, int]:
        """The whole state, for JSON; `from_state` continues from it exactly."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any], num_rows: int) -> Self:
        """The cursor with the state of `state()`. Raises ValueError if that is of another number of rows."""
        if state["num_rows"] != num_rows:
            raise ValueError(f"the saved cursor is for {state['num_rows']} rows, but the data now has {num_rows}")
        return cls(**state)
