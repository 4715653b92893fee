"""Columns and what a batch of them can do: splitting, joining, sharding and storing follow from its fields.

`data.batch` lists the kinds of batches and all their columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, Self

import numpy as np
from typing_extensions import TypeVar

from xray_runtime.data.ragged import A, B, Ragged, join_column, load_columns, non_finite, save_columns

K = TypeVar("K", bound="ColumnBatch[Any]")


class Column:
    """One column of a kind of batch: it reads the batch's values, and describes them."""

    def __init__(
        self, shape: str, dtype: str, writer: str, readers: str, meaning: str, *, required: bool, wire: bool
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        """A numpy type."""
        self.writer = writer
        """Module of xray_runtime that writes it."""
        self.readers, self.meaning = readers, meaning
        self.required = required
        self.wire = wire
        """Whether it is sent to models."""

    def __set_name__(self, kind: type, name: str) -> None:
        self.name = name

    def __get__(self, batch: ColumnBatch[Any] | None, kind: type) -> Any:
        value = None if batch is None else vars(batch)[self.name]
        if value is None and (batch is not None or self.required):
            # For a class, dataclasses take this as "no default", and None as the default.
            raise AttributeError(f"this {kind.__name__} has no column {self.name!r}")
        return value

    def __set__(self, batch: ColumnBatch[Any], value: Any) -> None:
        vars(batch)[self.name] = value


def column(
    shape: str, dtype: str, writer: str, readers: str, meaning: str, *, required: bool = False, wire: bool = True
) -> Any:
    """A field that is a `Column`."""
    return Column(shape, dtype, writer, readers, meaning, required=required, wire=wire)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ColumnBatch(Generic[A]):
    """Rows in columns that all have the same number of rows."""

    others: Mapping[str, A | Ragged[A]] = field(default_factory=dict)
    """Columns whose names no kind declares, as the scores of branches under their roles."""

    @classmethod
    def declared(cls) -> dict[str, Column]:
        """The columns that such a batch may have."""
        values = (vars(kind).get(each.name) for each in fields(cls) for kind in cls.__mro__)
        return {column.name: column for column in values if isinstance(column, Column)}

    def columns(self) -> dict[str, A | Ragged[A]]:
        """Name → values, of the columns that there are."""
        known = {each.name: vars(self)[each.name] for each in fields(self) if each.name != "others"}
        return {name: values for name, values in known.items() if values is not None} | dict(self.others)

    def __contains__(self, name: str) -> bool:
        return vars(self).get(name) is not None or name in self.others

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} rows: {', '.join(self.columns())})"

    def __len__(self) -> int:
        return next((len(values) for values in self.columns().values()), 0)

    @classmethod
    def of_columns(cls, columns: Mapping[str, A | Ragged[A]]) -> Self:
        """The batch of these columns; names that are not declared are `others`."""
        known = {each.name for each in fields(cls)}
        others = {name: values for name, values in columns.items() if name not in known}
        given: dict[str, Any] = {name: values for name, values in columns.items() if name in known}
        return cls(**given, others=others)

    def as_kind(self, kind: type[K], **more: A | Ragged[A] | None) -> K:
        """The columns as another kind of batch, with `more` columns; None: without that column."""
        given: dict[str, Any] = self.columns()
        return kind.of_columns({name: values for name, values in (given | more).items() if values is not None})

    def with_columns(self, **more: A | Ragged[A] | None) -> Self:
        """The batch with other or `more` columns; None: without that column."""
        return self.as_kind(type(self), **more)

    def pick(self, *names: str) -> dict[str, A | Ragged[A]]:
        """These columns, as far as the batch has them."""
        return {name: values for name, values in self.columns().items() if name in names}

    def on_wire(self) -> Self:
        """The columns that are sent to models."""
        wired = {name for name, column in self.declared().items() if column.wire}
        return self.of_columns(self.pick(*wired, *self.others))

    def map(self, function: Callable[[A], B]) -> ColumnBatch[B]:
        """A batch of the same kind with `function` of every array."""
        done: dict[int, B] = {}

        def once(array: A) -> B:
            # Ragged columns share offsets.
            if id(array) not in done:
                done[id(array)] = function(array)
            return done[id(array)]

        kind: type[ColumnBatch[B]] = type(self)  # type: ignore[assignment]
        given = self.columns().items()
        return kind.of_columns({n: v.map(once) if isinstance(v, Ragged) else once(v) for n, v in given})

    def take(self: K, index: Sequence[int] | np.ndarray) -> K:
        """The rows at `index`, in that order."""
        places = np.asarray(index, dtype=np.int64)
        return self.of_columns({name: values[places] for name, values in self.columns().items()})

    @classmethod
    def join(cls: type[K], parts: Sequence[K], places: Sequence[Sequence[int] | range]) -> K:
        """One batch from parts; `places` are the row indices of each part."""
        given = [part.columns() for part in parts]
        names = given[0] if given else {}
        return cls.of_columns({name: join_column([part[name] for part in given], places) for name in names})

    @classmethod
    def concat(cls: type[K], parts: Sequence[K]) -> K:
        """The rows of several parts, one part after the other."""
        ends = np.cumsum([0, *map(len, parts)]).tolist()
        return cls.join(parts, [range(start, end) for start, end in pairwise(ends)])

    def shard_places(self, count: int) -> list[np.ndarray]:
        """The rows of each of `count` shards: r, r + count, … of shard r, so that sorted lengths stay balanced.

        Where rows have the same prompts, shards are neighbours instead, sorted by prompt: a prompt is in few shards.
        """
        alike = self.first_with_prompt() if count > 1 else np.arange(len(self))
        if len(np.unique(alike)) < len(self):
            return np.array_split(np.argsort(alike, kind="stable"), count)
        return [np.arange(r, len(self), count) for r in range(count)]

    def first_with_prompt(self) -> np.ndarray:
        """For each row, the first one with the same prompt [B]."""
        return np.arange(len(self))

    @property
    def num_bytes(self: ColumnBatch) -> int:
        """Size of all arrays."""
        columns = self.columns().values()
        return sum(c.values.nbytes + c.offsets.nbytes if isinstance(c, Ragged) else c.nbytes for c in columns)

    def non_finite(self: ColumnBatch) -> str | None:
        """`ragged.non_finite` of all columns."""
        return non_finite(self.columns())

    def save(self: ColumnBatch, path: Path) -> None:
        save_columns(path, self.columns())

    @classmethod
    def load(cls: type[K], path: Path) -> K:
        return cls.of_columns(load_columns(path))
