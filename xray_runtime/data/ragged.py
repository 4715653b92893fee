"""Rows of different lengths without padding, and files of columns.

Numpy, not torch: Ray maps numpy arrays from its object store without a copy, and a proxy need not import torch. A
micro-batch holds the same columns as tensors (`cluster.micro_batches`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike
from typing_extensions import TypeVar

if TYPE_CHECKING:
    from torch import Tensor

A = TypeVar("A", bound="np.ndarray | Tensor", default="np.ndarray")
"""The arrays of a batch: numpy's on the way, tensors in a micro-batch."""
B = TypeVar("B", bound="np.ndarray | Tensor")

OFFSETS = ".offsets"
"""Suffixes of names in files: for ragged columns, and for columns of text (`TEXTS`)."""
TEXTS = ".texts"


@dataclass(frozen=True, eq=False)
class Ragged(Generic[A]):
    """Concatenated rows of different lengths.

    Rows [5, 6] and [7] are the values [5, 6, 7] and the offsets [0, 2, 3].
    """

    values: A
    """[N] or [N, …], all rows in order."""
    offsets: A
    """[B + 1] int64: row i is values[offsets[i] : offsets[i + 1]]."""

    @staticmethod
    def of(rows: Iterable[ArrayLike], dtype: DTypeLike = np.int64) -> Ragged:
        """These rows."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        return Ragged(np.concatenate([np.zeros(0, dtype), *arrays]), offsets)

    @property
    def lengths(self) -> A:
        """Length of each row [B]."""
        return cast("A", self.offsets[1:] - self.offsets[:-1])

    def map(self, function: Callable[[A], B]) -> Ragged[B]:
        """`function` of values and offsets."""
        return Ragged(function(self.values), function(self.offsets))

    def like(self, values: A) -> Ragged[A]:
        """Other values in rows of the same lengths."""
        return Ragged(values, self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self: Ragged) -> Iterator[np.ndarray]:
        return iter(np.split(self.values, self.offsets[1:-1]) if len(self) else [])

    def __getitem__(self: Ragged, index: slice | np.ndarray) -> Ragged:
        """The rows at `index`, in that order."""
        chosen = np.arange(len(self))[index]
        return self._gather(self.offsets[:-1][chosen], self.lengths[chosen])

    def heads(self: Ragged, lengths: np.ndarray) -> Ragged:
        """The first `lengths` [B] values of each row."""
        return self._gather(self.offsets[:-1], lengths)

    def spread(self: Ragged, places: np.ndarray, count: int) -> Ragged:
        """These rows at `places`, in ascending order, of `count` rows; the others are empty."""
        lengths = np.zeros(count, np.int64)
        lengths[places] = self.lengths
        return Ragged(self.values, np.cumsum([0, *lengths], dtype=np.int64))

    def _gather(self: Ragged, starts: np.ndarray, lengths: np.ndarray) -> Ragged:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Ragged(self.values[places], offsets)

    def mask(self: Ragged) -> np.ndarray:
        """Which positions of the padded rows [B, T] hold values, T being the maximum length."""
        places: np.ndarray = np.arange(self.lengths.max(initial=0)) < self.lengths[:, None]
        return places

    def dense(self: Ragged) -> np.ndarray:
        """The rows [B, T], or [B, T, k], padded with 0."""
        mask = self.mask()
        out = np.zeros((*mask.shape, *self.values.shape[1:]), dtype=self.values.dtype)
        out[mask] = self.values
        return out


Values: TypeAlias = np.ndarray | Ragged
"""A column of B rows: numbers or texts [B], or rows of different lengths."""


def join_column(parts: Sequence[Values], places: Sequence[Sequence[int] | range]) -> Values:
    """One column from parts; `places` are the row indices of each part."""
    order = np.argsort(np.concatenate(places), kind="stable")
    if not isinstance(parts[0], Ragged):
        return np.concatenate([part for part in parts if not isinstance(part, Ragged)])[order]
    return join_ragged([part for part in parts if isinstance(part, Ragged)], places)


def join_ragged(parts: Sequence[Ragged], places: Sequence[Sequence[int] | range]) -> Ragged:
    """`join_column` of ragged rows."""
    order = np.argsort(np.concatenate(places), kind="stable")
    lengths = np.concatenate([part.lengths for part in parts])
    return Ragged(np.concatenate([part.values for part in parts]), np.cumsum([0, *lengths]))[order]


def first_alike(keys: Iterable[Hashable]) -> np.ndarray:
    """For each row, the first row with the same key [B] int64."""
    first: dict[Hashable, int] = {}
    return np.array([first.setdefault(key, row) for row, key in enumerate(keys)], np.int64)


def balance(costs: Sequence[int] | np.ndarray, num_loads: int) -> list[list[int]]:
    """Row indices of `num_loads` loads of nearly equal cost: the costliest row first, each to the least load.

    The same costs give the same loads. A load may stay empty.
    """
    loads: list[list[int]] = [[] for _ in range(num_loads)]
    # Where totals are equal, the first load counts as the least.
    totals = [(0, load) for load in range(num_loads)]
    for row in np.argsort(-np.asarray(costs), kind="stable").tolist():
        total, least = totals[0]
        loads[least].append(row)
        heapq.heapreplace(totals, (total + int(costs[row]), least))
    return [sorted(load) for load in loads]


def non_finite(columns: Mapping[str, Values]) -> str | None:
    """The first column with NaN or infinite numbers, as "`values` of 2 of 64 rows (the first: row 5)"."""
    for name, column in columns.items():
        values = column.values if isinstance(column, Ragged) else np.asarray(column)
        wrong = ~np.isfinite(values)
        if wrong.any():
            places = np.nonzero(wrong)[0]
            if isinstance(column, Ragged):
                places = np.searchsorted(column.offsets, places, side="right") - 1
            count = len(np.unique(places))
            return f"{name} of {count} of {len(column)} rows (the first: row {places[0]})"
    return None


def save_columns(path: Path, columns: Mapping[str, Values]) -> None:
    """Write columns to a file for `load_columns`, which restores the same bytes; texts are stored as UTF-8."""
    from safetensors.numpy import save_file

    arrays: dict[str, np.ndarray] = {}
    for name, column in columns.items():
        stored, suffix = column, OFFSETS
        if not isinstance(column, Ragged) and column.dtype == object:
            stored = Ragged.of((np.frombuffer(text.encode(), np.uint8) for text in column), np.uint8)
            suffix = TEXTS
        if isinstance(stored, Ragged):
            arrays |= {f"{name}{suffix}": stored.offsets}
        arrays[name] = np.ascontiguousarray(stored.values if isinstance(stored, Ragged) else stored)
    save_file(arrays, path)


def load_columns(path: Path) -> dict[str, Values]:
    """Read the file of `save_columns`."""
    from safetensors.numpy import load_file

    arrays = load_file(path)
    columns: dict[str, Values] = {}
    for name, array in arrays.items():
        if name.endswith((OFFSETS, TEXTS)):
            continue
        columns[name] = array
        if f"{name}{OFFSETS}" in arrays:
            columns[name] = Ragged(array, arrays[f"{name}{OFFSETS}"])
        if f"{name}{TEXTS}" in arrays:
            texts = Ragged(array, arrays[f"{name}{TEXTS}"])
            columns[name] = np.array([bytes(text).decode() for text in texts], object)
    return columns
