"""Digests of files, remembered on disk, so that a file that did not change is not read again.

A file counts as unchanged while its path, size, inode and both its times are the same. The time of modification alone
would not do: archives and copies set it back, an inode is used again, and two models of one shape have one size. A file
that changed within the last seconds is not remembered: a second change in the same tick of the file system's clock
would not show.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)

WAIT_S = 30.0
"""How long to wait for another process that writes."""
SETTLED_S = 3.0
"""Age from which a change is remembered. FAT keeps times to two seconds; other file systems are finer."""
DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
"""What SQLite says of a file that is no such memory; SQLITE_ERROR of a database with another table in it."""
COLUMNS = ("path", "size", "mtime_ns", "ctime_ns", "inode")
WRITE_AFTER_BYTES = 1 << 30
"""A reader of many files remembers what it has done each time it has read as much."""


class OutsideChangedError(ValueError):
    """Something read from outside changed meanwhile; one line that names it."""


@dataclass(frozen=True)
class FileState:
    """What tells that a file has not changed."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """The state of a file, of what a link leads to."""
        real = os.path.realpath(path)
        stat = os.stat(real)
        return cls(real, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


class DigestMemory:
    """sha256 of files by their state, in one SQLite file that several processes may use at once.

    A damaged file is set aside and begun anew. Where the memory cannot be read or written (a full disk, a directory
    that is read-only), files are read each time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def recall(self, state: FileState) -> str | None:
        """The digest of the file in this very state, if it is known."""
        same = " AND ".join(f"{column} = ?" for column in COLUMNS)
        rows = self._run(f"SELECT sha256 FROM files WHERE {same}", [_row(state)])
        return rows[0][0] if rows else None

    def remember(self, digests: Iterable[tuple[FileState, str]]) -> None:
        """Keep digests of files, in one transaction."""
        rows = [(*_row(state), digest) for state, digest in digests]
        if rows:
            self._run("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", rows)

    def _run(self, statement: str, rows: list[tuple[str | int, ...]]) -> list[tuple[str]]:
        try:
            return self._once(statement, rows)
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF not in DAMAGE:
                logger.warning("%s cannot be used (%s): files are read each time", self.path, error)
                return []
        except OSError as error:
            logger.warning("%s cannot be used (%s): files are read each time", self.path, error)
            return []
        try:
            # Where two processes find the damage at once, the second sets a new memory aside: it only costs reading.
            with contextlib.suppress(FileNotFoundError):
                self.path.rename(self.path.with_name(f"{self.path.name}.damaged"))
            self.path.with_name(f"{self.path.name}-journal").unlink(missing_ok=True)
            logger.warning("%s was damaged and is started anew", self.path)
            return self._once(statement, rows)
        except (OSError, sqlite3.DatabaseError) as error:
            logger.warning("%s cannot be used (%s): files are read each time", self.path, error)
            return []

    def _once(self, statement: str, rows: list[tuple[str | int, ...]]) -> list[tuple[str]]:
        with self._open() as connection:
            if not statement.startswith("SELECT"):
                connection.executemany(statement, rows)
                return []
            return connection.execute(statement, rows[0]).fetchall()

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        # A connection of its own each time: they do not survive a fork, nor a file that is set aside.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(self.path, timeout=WAIT_S)) as connection, connection:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, size INTEGER NOT NULL, "
                "mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL, inode INTEGER NOT NULL, sha256 TEXT NOT NULL)"
            )
            yield connection


def _row(state: FileState) -> tuple[str | int, ...]:
    # SQLite's integers are signed, and some file systems use all 64 bits of an inode; a path may be no UTF-8.
    path = os.fsencode(state.path).decode("utf-8", "backslashreplace")
    inode = state.inode - (1 << 64) if state.inode >= 1 << 63 else state.inode
    return (path, state.size, state.mtime_ns, state.ctime_ns, inode)


@dataclass
class FileReader:
    """Digests files one after the other, and remembers them in few transactions."""

    memory: DigestMemory
    _new: list[tuple[FileState, str]] = field(default_factory=list)
    _bytes: int = 0

    def digest(self, path: Path) -> str:
        """sha256 of a file's bytes.

        Raises:
            OutsideChangedError: the file changed while it was read.
            OSError: it cannot be read.
        """
        before = FileState.of(path)
        known = self.memory.recall(before)
        if known is not None:
            return known
        settled = time.time_ns() - before.ctime_ns > SETTLED_S * 1e9
        with open(before.path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if FileState.of(path) != before:
            raise OutsideChangedError(f"{path} changed while it was read; run again once nothing writes to it")
        if settled:
            self._new.append((before, digest))
            self._bytes += before.size
        if self._bytes >= WRITE_AFTER_BYTES:
            self.flush()
        return digest

    def flush(self) -> None:
        """Remember what was read."""
        self.memory.remember(self._new)
        self._new, self._bytes = [], 0
