"""Batches of rows: a resumable order over epochs, and micro-batches of similar length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xray_runtime.kernel.seeding import derive_seed

ROUNDS = 12
"""Rounds of `permuted`: four suffice for random functions; ours are simpler, and small N need more to be uniform."""


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
        num_tokens = shared[group[0]] + sum(lengths[i] - shared[i] for i in group)
        begins = not batches or room < num_tokens <= max_tokens
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


def permuted(places: np.ndarray, num_rows: int, seed: int) -> np.ndarray:
    """Which rows, int64 [n], stand at `places` of the order that `seed` gives: int64 [n], each in [0, num_rows), with
    `num_rows` at most 2³¹ − 1. The order is computed, not stored: a position takes O(1) memory.

    A Feistel network (Luby & Rackoff 1988) over pairs (x, y) of Z_a × Z_b with a·b ≥ N permutes [0, a·b); halves are
    added modulo a and b, not xored, so that a·b is at most N + √N + 1. Values outside [0, N) are permuted again until
    they fall inside ("cycle walking", Black & Rogaway 2002), which gives a permutation of [0, N).
    """
    keys = [np.uint64(derive_seed(seed, "round", number)) for number in range(ROUNDS)]
    rows = places.astype(np.uint64)
    outside = np.arange(len(rows))
    while len(outside):
        rows[outside] = _network(rows[outside], num_rows, keys)
        outside = outside[rows[outside] >= num_rows]
    return rows.astype(np.int64)


def _network(values: np.ndarray, num_rows: int, keys: list[np.uint64]) -> np.ndarray:
    width = math.isqrt(num_rows - 1) + 1
    height = np.uint64(-(-num_rows // width))
    y, x = np.divmod(values, np.uint64(width))
    for number, key in enumerate(keys):
        if number % 2:
            y = (y + _mixed(x, key)) % height
        else:
            x = (x + _mixed(y, key)) % np.uint64(width)
    mixed: np.ndarray = y * np.uint64(width) + x
    return mixed


def _mixed(half: np.ndarray, key: np.uint64) -> np.ndarray:
    """A hash of each half with the round's key, uint64: splitmix64's finalizer (Steele et al. 2014)."""
    z = (half << np.uint64(32) | key) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    # Kept small, so that adding a half cannot overflow.
    return z >> np.uint64(1)
