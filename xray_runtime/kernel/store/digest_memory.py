"""Digests of files, remembered on disk, so that an unchanged file is not read again.

A file is unchanged while its path, size, inode and both its times are the same. The modification time alone would not
do: archives and copies set it back, inodes are used again, and two models of one shape have one size.

Any write, rename or link of a file sets its change time (ctime) to the system's clock, and no call sets it otherwise,
unlike the modification time. A file that changed lately is not remembered, since two changes may leave one time: in the
same tick of the file system's clock; and by a program that has mapped the file into its memory, until the system has
written the first one to the disk, which it begins within 30 s. Nor is a file on a file system without a disk, where
that never happens, or without change times (`CANNOT_TELL`).

So the memory cannot be deceived by edits, copies or times set back, but by whoever sets the clock, writes to the disk
behind the file system, or writes to the memory itself, and it does not see bits that rot.
Whatever must hold against these reads every byte: publication, promotion, `xray audit`, export and the shared store.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

DIGESTS = "digests.sqlite"
"""The memory of an output directory."""
WAIT_S = 30.0
"""How long to wait for another process that writes."""
SETTLED_S = 120.0
"""Age of the last change from which a file is remembered."""
CANNOT_TELL = frozenset({"exfat", "msdos", "ramfs", "tmpfs", "vfat"})
"""File systems on which files change and keep their times. FAT has no change times."""
MOUNTS = Path("/proc/self/mountinfo")
DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
"""SQLite's errors for a damaged file; SQLITE_ERROR for a database with another table in it."""
TABLE = (
    "CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, "
    "ctime_ns INTEGER NOT NULL, inode INTEGER NOT NULL, sha256 TEXT NOT NULL)"
)
RECALL = "SELECT sha256 FROM files WHERE path = ? AND size = ? AND mtime_ns = ? AND ctime_ns = ? AND inode = ?"
REMEMBER = "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)"
WRITE_AFTER_BYTES = 1 << 30
"""A reader of many files writes what it has read so far each time it has read this much."""


class OutsideChangedError(ValueError):
    """A file changed while it was read; one line that names it."""


class FileState(NamedTuple):
    """A file's row in the memory: it changes whenever the file does."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """The state of a file, or of the file a link leads to."""
        real = os.path.realpath(path)
        stat = os.stat(real)
        # SQLite's integers are signed, and some file systems use all 64 bits of an inode; a path may not be UTF-8.
        text = os.fsencode(real).decode("utf-8", "backslashreplace")
        inode = stat.st_ino - (1 << 64) if stat.st_ino >= 1 << 63 else stat.st_ino
        return cls(text, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, inode)


def shows_changes(path: Path, changed_ns: int) -> bool:
    """Whether any change from now on of a file or directory, or of what is below it, gives it another state.

    Args:
        changed_ns: the last change time in it.
    """
    return time.time_ns() - changed_ns > SETTLED_S * 1e9 and _file_system(os.stat(path).st_dev) not in CANNOT_TELL


def _file_system(device: int) -> str:
    """The kind of the file system on a device; empty where the system does not say."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        # https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html: 36 35 98:0 / /mnt rw - ext3 /dev/root rw
        mounts = (line.partition(" - ") for line in MOUNTS.read_text(errors="replace").splitlines())
        return next((kind.split()[0] for mount, _, kind in mounts if mount.split()[2] == number), "")
    except OSError:
        return ""


class DigestMemory:
    """sha256 of files by their state, in one SQLite file that several processes may use at once.

    A damaged file is set aside and started anew. Where the memory cannot be read or written (a full disk, a read-only
    directory), files are read each time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def recall(self, state: FileState) -> str | None:
        """The digest of a file in this very state, if it is known."""
        rows = self._run(RECALL, [state])
        return rows[0][0] if rows else None

    def remember(self, digests: Sequence[tuple[FileState, str]]) -> None:
        """Keep digests of files, in one transaction."""
        if digests:
            self._run(REMEMBER, [(*state, digest) for state, digest in digests])

    def _run(self, statement: str, rows: Sequence[tuple[str | int, ...]]) -> list[tuple[str]]:
        for retry in (True, False):
            try:
                return self._once(statement, rows)
            except (OSError, sqlite3.DatabaseError) as error:
                if not retry or getattr(error, "sqlite_errorcode", 0) & 0xFF not in DAMAGE:
                    logger.warning("%s cannot be used (%s): files are read each time", self.path, error)
                    return []
            # If two processes find the damage at once, the second sets a new memory aside, which only costs reading.
            with contextlib.suppress(OSError):
                self.path.rename(self.path.with_name(f"{self.path.name}.damaged"))
                self.path.with_name(f"{self.path.name}-journal").unlink(missing_ok=True)
            logger.warning("%s was damaged and is created again", self.path)
        return []

    def _once(self, statement: str, rows: Sequence[tuple[str | int, ...]]) -> list[tuple[str]]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A connection of its own each time: connections survive neither a fork nor a file that is set aside.
        with contextlib.closing(sqlite3.connect(self.path, timeout=WAIT_S)) as connection, connection:
            connection.execute(TABLE)
            if statement == RECALL:
                return connection.execute(statement, rows[0]).fetchall()
            connection.executemany(statement, rows)
            return []


class FileReader(contextlib.AbstractContextManager["FileReader"]):
    """Digests files, in any number of threads, and remembers them in few transactions; at its end all that it read."""

    def __init__(self, memory: DigestMemory) -> None:
        self._memory, self._new, self._bytes = memory, list[tuple[FileState, str]](), 0
        self._lock = threading.Lock()

    def digest(self, path: Path) -> str:
        """sha256 of a file's bytes.

        Raises:
            OutsideChangedError: the file changed while it was read.
            OSError: it cannot be read.
        """
        before = FileState.of(path)
        known = self._memory.recall(before)
        if known is not None:
            return known
        settled = shows_changes(path, before.ctime_ns)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if FileState.of(path) != before:
            raise OutsideChangedError(f"{path} changed while it was read; run again once nothing writes to it")
        if settled:
            with self._lock:
                self._new.append((before, digest))
                self._bytes += before.size
        if self._bytes >= WRITE_AFTER_BYTES:
            self._flush()
        return digest

    def __exit__(self, *_: object) -> None:
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            self._memory.remember(self._new)
            self._new, self._bytes = [], 0
