"""Mappings whose first entries are rows of a database in memory, and whose later ones lie over it.

A copy shares the rows: it takes as long as the changes since. Rows are read when they are asked for.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Generic, Self, TypeVar

V = TypeVar("V")


class Rows:
    """Mappings from text to text in one database, each with a name and in order."""

    def __init__(self, content: bytes | None = None) -> None:
        # A connection serializes its callers' threads by itself.
        self._database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        if content is not None:
            self._database.deserialize(content)

    def write(self, name: str, entries: Mapping[str, str]) -> None:
        self._database.execute(f"CREATE TABLE {name} (number INTEGER PRIMARY KEY, key TEXT UNIQUE, value TEXT)")
        self._database.execute("BEGIN")
        self._database.executemany(f"INSERT INTO {name} (key, value) VALUES (?, ?)", entries.items())
        self._database.execute("COMMIT")

    def content(self) -> bytes:
        """The whole database."""
        return self._database.serialize()

    def get(self, name: str, key: str) -> str | None:
        found = self._database.execute(f"SELECT value FROM {name} WHERE key = ?", (key,)).fetchone()
        return None if found is None else str(found[0])

    def items(self, name: str) -> Iterator[tuple[str, str]]:
        return iter(self._database.execute(f"SELECT key, value FROM {name} ORDER BY number"))

    def count(self, name: str) -> int:
        return int(self._database.execute(f"SELECT count(*) FROM {name}").fetchone()[0])


class Layered(MutableMapping[str, V], Generic[V]):
    """The mapping `name` of `rows`, whose values `read` makes of their text, with changes over it."""

    def __init__(self, rows: Rows, name: str, read: Callable[[str], V]) -> None:
        self._rows, self._name, self._read = rows, name, read
        self._count = rows.count(name)
        self._gone = set[str]()
        """Keys of rows that count no more: removed, or set anew."""
        self._own: dict[str, V] = {}

    def __copy__(self) -> Self:
        other = type(self).__new__(type(self))
        other.__dict__ |= self.__dict__ | {"_gone": self._gone.copy(), "_own": self._own.copy()}
        return other

    def __getitem__(self, key: str) -> V:
        if key in self._own:
            return self._own[key]
        text = None if key in self._gone else self._rows.get(self._name, key)
        if text is None:
            raise KeyError(key)
        return self._read(text)

    def __setitem__(self, key: str, value: V) -> None:
        self._hide(key)
        self._own[key] = value

    def __delitem__(self, key: str) -> None:
        hidden = self._hide(key)
        if key in self._own:
            del self._own[key]
        elif not hidden:
            raise KeyError(key)

    def _hide(self, key: str) -> bool:
        """Make a row count no more; returns whether one did."""
        if key in self._gone or self._rows.get(self._name, key) is None:
            return False
        self._gone.add(key)
        return True

    def __iter__(self) -> Iterator[str]:
        yield from (key for key, _ in self._rows.items(self._name) if key not in self._gone)
        yield from self._own

    def __len__(self) -> int:
        return self._count - len(self._gone) + len(self._own)
