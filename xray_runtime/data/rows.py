"""Batches between actors: a dict of columns with one entry per row.

Rows of text have different lengths, and no column is padded: token ids and per-token values are `Ragged`.

Numpy, not torch: Ray maps numpy arrays from its object store without a copy, and a proxy need not import torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

Rows = dict[str, Any]
"""Column name → array [B, …] or `Ragged` of B rows; every column has the same B."""
OFFSETS = ".offsets"
"""Suffixes of names in files: for ragged columns, and for columns of text (`TEXTS`)."""
TEXTS = ".texts"


@dataclass(frozen=True, eq=False)
class Ragged:
    """Concatenated rows of different lengths.

    Rows [5, 6] and [7] are the values [5, 6, 7] and the offsets [0, 2, 3].
    """

    values: np.ndarray
    """[N] or [N, …], all rows in order."""
    offsets: np.ndarray
    """[B + 1] int64: row i is values[offsets[i] : offsets[i + 1]]."""

    @classmethod
    def of(cls, rows: Iterable[ArrayLike], dtype: DTypeLike = np.int64) -> Ragged:
        """These rows."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        return cls(np.concatenate([np.zeros(0, dtype), *arrays]), offsets)

    @property
    def lengths(self) -> np.ndarray:
        """Length of each row [B]."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(np.split(self.values, self.offsets[1:-1]) if len(self) else [])

    def __getitem__(self, index: slice | np.ndarray) -> Ragged:
        """The rows at `index`, in that order."""
        chosen = np.arange(len(self))[index]
        return self._gather(self.offsets[:-1][chosen], self.lengths[chosen])

    def heads(self, lengths: np.ndarray) -> Ragged:
        """The first `lengths` [B] values of each row."""
        return self._gather(self.offsets[:-1], lengths)

    def spread(self, places: np.ndarray, count: int) -> Ragged:
        """These rows at `places`, in ascending order, of `count` rows; the others are empty."""
        lengths = np.zeros(count, np.int64)
        lengths[places] = self.lengths
        return Ragged(self.values, np.cumsum([0, *lengths], dtype=np.int64))

    def _gather(self, starts: np.ndarray, lengths: np.ndarray) -> Ragged:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Ragged(self.values[places], offsets)

    def mask(self) -> np.ndarray:
        """Which positions of the padded rows [B, T] hold values, T being the maximum length."""
        places: np.ndarray = np.arange(self.lengths.max(initial=0)) < self.lengths[:, None]
        return places

    def dense(self) -> np.ndarray:
        """The rows [B, T], padded with 0."""
        mask = self.mask()
        out = np.zeros(mask.shape, dtype=self.values.dtype)
        out[mask] = self.values
        return out


def num_rows(rows: Rows) -> int:
    return len(next(iter(rows.values())))


def take(rows: Rows, index: Sequence[int] | np.ndarray) -> Rows:
    """The rows at `index`, in that order."""
    return {name: column[np.asarray(index, dtype=np.int64)] for name, column in rows.items()}


def row_keys(rows: Rows) -> list[bytes]:
    """The tokens of each row, prompt and reply separate, as a key."""
    both = zip(rows["input_ids"], rows["prompt_lengths"], strict=True)
    return [np.append(ids, length).astype(np.int64).tobytes() for ids, length in both]


def alike_prompts(rows: Rows) -> np.ndarray:
    """For each sequence, the first one with the same prompt: of rows [B], of pairs all chosen ones and then all
    rejected ones [2B]."""
    lengths = rows["prompt_lengths"]
    sides = [rows[name] for name in ("input_ids", "rejected_ids") if name in rows]
    return first_alike(prompt.tobytes() for side in sides for prompt in side.heads(np.minimum(lengths, side.lengths)))


def first_alike(keys: Iterable[Hashable]) -> np.ndarray:
    """For each row, the first row with the same key [B] int64."""
    first: dict[Hashable, int] = {}
    return np.array([first.setdefault(key, row) for row, key in enumerate(keys)], np.int64)


def num_response_tokens(rows: Rows) -> int:
    """The number of response tokens; with a `response_mask`, of those where it is True."""
    if "response_mask" in rows:
        return int(rows["response_mask"].values.sum())
    return int(len(rows["input_ids"].values) - rows["prompt_lengths"].sum())


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
    """Shard r gets rows r, r + num_shards, …, so that sorted lengths stay balanced.

    Where rows have the same prompts, shards are neighbours instead, sorted by prompt: a prompt is in few shards.
    """
    return [rows] if num_shards == 1 else [take(rows, places) for places in _shard_places(rows, num_shards)]


def merge(shards: Sequence[Rows], rows: Rows) -> Rows:
    """Join what was made of the shards of `rows`, in the order of `rows`."""
    return join(shards, [places.tolist() for places in _shard_places(rows, len(shards))])


def _shard_places(rows: Rows, num_shards: int) -> list[np.ndarray]:
    count = num_rows(rows)
    alike = alike_prompts(rows)[:count] if "prompt_lengths" in rows and num_shards > 1 else np.arange(count)
    if len(np.unique(alike)) < count:
        return np.array_split(np.argsort(alike, kind="stable"), num_shards)
    return [np.arange(r, count, num_shards) for r in range(num_shards)]


def join(parts: Sequence[Rows], places: Sequence[Sequence[int] | range]) -> Rows:
    """Rows from parts; `places` are the row indices of each part."""
    return {name: join_column([part[name] for part in parts], places) for name in parts[0]}


def join_column(parts: Sequence[Any], places: Sequence[Sequence[int] | range]) -> Any:
    """One column from parts, as `join`."""
    order = np.argsort(np.concatenate(places), kind="stable")
    values = np.concatenate([part.values if isinstance(part, Ragged) else part for part in parts])
    if not isinstance(parts[0], Ragged):
        return values[order]
    return Ragged(values, np.cumsum([0, *np.concatenate([part.lengths for part in parts])]))[order]


def non_finite(rows: Rows) -> str | None:
    """The first column with NaN or infinite numbers, as "`values` of 2 of 64 rows (the first: row 5)"."""
    for name, column in rows.items():
        values = column.values if isinstance(column, Ragged) else np.asarray(column)
        wrong = ~np.isfinite(values)
        if wrong.any():
            places = np.nonzero(wrong)[0]
            if isinstance(column, Ragged):
                places = np.searchsorted(column.offsets, places, side="right") - 1
            count = len(np.unique(places))
            return f"{name} of {count} of {len(column)} rows (the first: row {places[0]})"
    return None


def save_rows(path: Path, rows: Rows) -> None:
    """Write `rows` to a file for `load_rows`, which restores the same bytes; texts are stored as UTF-8."""
    from safetensors.numpy import save_file

    arrays: dict[str, np.ndarray] = {}
    for name, column in rows.items():
        stored, suffix = column, OFFSETS
        if not isinstance(column, Ragged) and column.dtype == object:
            stored = Ragged.of((np.frombuffer(text.encode(), np.uint8) for text in column), np.uint8)
            suffix = TEXTS
        if isinstance(stored, Ragged):
            arrays |= {f"{name}{suffix}": stored.offsets}
        arrays[name] = np.ascontiguousarray(stored.values if isinstance(stored, Ragged) else stored)
    save_file(arrays, path)


def load_rows(path: Path) -> Rows:
    """Read the file of `save_rows`."""
    from safetensors.numpy import load_file

    arrays = load_file(path)
    rows: Rows = {}
    for name, array in arrays.items():
        if name.endswith((OFFSETS, TEXTS)):
            continue
        rows[name] = array
        if f"{name}{OFFSETS}" in arrays:
            rows[name] = Ragged(array, arrays[f"{name}{OFFSETS}"])
        if f"{name}{TEXTS}" in arrays:
            texts = Ragged(array, arrays[f"{name}{TEXTS}"])
            rows[name] = np.array([bytes(text).decode() for text in texts], object)
    return rows


def text_rows(prompts: Sequence[Sequence[int] | np.ndarray], replies: Iterable[Sequence[int] | np.ndarray]) -> Rows:
    """Rows of prompt and reply together: ragged `input_ids`, and `prompt_lengths` [B]."""
    input_ids = Ragged.of([*prompt, *reply] for prompt, reply in zip(prompts, replies, strict=True))
    return {"input_ids": input_ids, "prompt_lengths": np.array([len(p) for p in prompts], dtype=np.int64)}


def with_end_of_turn(reply: Sequence[int] | np.ndarray, stops: Sequence[int]) -> list[int]:
    """`reply`, with the first stop token (the end of turn) added if it ends with none, as in the reward model's
    data."""
    ids = list(reply)
    return ids if ids and ids[-1] in stops else [*ids, stops[0]]
