"""A seeded permutation of N rows that is computed, not stored: looking up a position takes O(1) memory.

A Feistel network (Luby & Rackoff 1988) over pairs (x, y) of Z_a × Z_b with a·b ≥ N permutes [0, a·b); halves are added
modulo a and b, not xored, so that a·b is at most N + √N + 1. Values outside [0, N) are permuted again until they
fall inside ("cycle walking", Black & Rogaway 2002), which gives a permutation of [0, N).
"""

from __future__ import annotations

import math

import numpy as np

from xray_runtime.seeding import derive_seed

ROUNDS = 12
"""Four rounds suffice for random functions; ours are simpler, and small N need more rounds to be uniform."""


def permuted(places: np.ndarray, num_rows: int, seed: int) -> np.ndarray:
    """Which rows, int64 [n], stand at `places` of the order that `seed` gives: int64 [n], each in [0, num_rows), with
    `num_rows` at most 2³¹ − 1."""
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
    return y * np.uint64(width) + x


def _mixed(half: np.ndarray, key: np.uint64) -> np.ndarray:
    """A hash of each half with the round's key, uint64: splitmix64's finalizer (Steele et al. 2014)."""
    z = (half << np.uint64(32) | key) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    # Kept small, so that adding a half cannot overflow.
    return z >> np.uint64(1)
