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


def balance(costs: Sequence[int] | np.ndarray, parts: int) -> list[list[int]]:
    """Row indices of `parts` loads of nearly equal cost: the costliest row first, each to the least loaded part.

    The same costs give the same loads. A part may stay empty.
    """
    loads: list[list[int]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for row in np.argsort(-np.asarray(costs), kind="stable").tolist():
        least = totals.index(min(totals))
        loads[least].append(row)
        totals[least] += int(costs[row])
    return [sorted(load) for load in loads]


def split(rows: Rows, parts: int) -> list[Rows]:
    """Deal rows out like cards: part r gets rows r, r + parts, …, so sorted lengths stay balanced."""
    return [{name: column[r::parts] for name, column in rows.items()} for r in range(parts)]


def merge(parts: Sequence[Rows]) -> Rows:
    """The inverse of `split`."""
    total = sum(num_rows(part) for part in parts)
    merged = {}
    for name, first in parts[0].items():
        out = np.empty((total, *first.shape[1:]), dtype=first.dtype)
        for r, part in enumerate(parts):
            out[r :: len(parts)] = part[name]
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
