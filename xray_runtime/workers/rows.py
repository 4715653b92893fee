"""Batches between actors: a dict of numpy arrays with one leading axis of rows.

Numpy, not torch: Ray maps numpy arrays from its object store without a copy, and a proxy need not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

Rows = dict[str, np.ndarray]
"""Column name → array [B, …]; every column has the same B."""


def num_rows(rows: Rows) -> int:
    return len(next(iter(rows.values())))


def take(rows: Rows, index: Sequence[int] | np.ndarray) -> Rows:
    """The rows at `index`, in that order."""
    return {name: column[np.asarray(index, dtype=np.int64)] for name, column in rows.items()}


def balance(costs: Sequence[int] | np.ndarray, num_loads: int) -> list[list[int]]:
    """Row indices of `num_loads` loads of nearly equal cost: the costliest row first, each to the least load.

    The same costs give the same loads. A load may stay empty.
    """
    loads: list[list[int]] = [[] for _ in range(num_loads)]
    totals = [0] * num_loads
    for row in np.argsort(-np.asarray(costs), kind="stable").tolist():
        least = totals.index(min(totals))
        loads[least].append(row)
        totals[least] += int(costs[row])
    return [sorted(load) for load in loads]


def shard(rows: Rows, num_shards: int) -> list[Rows]:
    """Shard r gets rows r, r + num_shards, …, so that sorted lengths stay balanced."""
    return [{name: column[r::num_shards] for name, column in rows.items()} for r in range(num_shards)]


def merge(shards: Sequence[Rows]) -> Rows:
    """The inverse of `shard`."""
    total = sum(num_rows(shard) for shard in shards)
    merged = {}
    for name, first in shards[0].items():
        out = np.empty((total, *first.shape[1:]), dtype=first.dtype)
        for r, rows in enumerate(shards):
            out[r :: len(shards)] = rows[name]
        merged[name] = out
    return merged


def pad(sequences: Iterable[Sequence[int]], value: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-pad integer sequences to one array [B, S]; also their lengths [B]."""
    lists = list(sequences)
    lengths = np.array([len(s) for s in lists], dtype=np.int64)
    out = np.full((len(lists), int(lengths.max(initial=0))), value, dtype=np.int64)
    for row, sequence in enumerate(lists):
        out[row, : len(sequence)] = sequence
    return out, lengths
