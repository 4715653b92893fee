"""Memory that processes of one machine share, mapped once and reused for many updates.

A copy into new shared memory takes ten times as long because of page faults, so writers keep files and readers keep
mappings. The files are memfds without names: readers of the same user open them as /proc/PID/fd/FD, and they end
with the last process that holds them.

A reader holds a shared lock (flock) on files that it may still read, which ends with its process. A writer reuses files
without a lock, but not those of its last round, which readers may be about to open. A reader that is even later finds
wrong checksums.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class SharedBytes:
    """`num_bytes` in an open file of process `pid`."""

    pid: int
    fd: int
    inode: int
    num_bytes: int


@dataclass(eq=False)
class _File:
    fd: int
    array: np.ndarray
    pid: int = field(default_factory=os.getpid)

    @property
    def inode(self) -> int:
        return os.fstat(self.fd).st_ino

    def lock(self, how: int) -> None:
        fcntl.flock(self.fd, how)

    def __del__(self) -> None:
        os.close(self.fd)


class SharedWriter:
    """The shared files of this process."""

    def __init__(self) -> None:
        self._files: list[_File] = []
        self._round: list[_File] = []
        self._last: list[_File] = []

    def begin(self) -> None:
        """Begin a round, whose memory is read together."""
        self._last, self._round = self._round, []

    def take(self, num_bytes: int) -> np.ndarray:
        """Memory of at least `num_bytes` to write."""
        taken = [*self._last, *self._round]
        free = [f for f in self._files if f.array.size >= num_bytes and f not in taken and _unread(f)]
        if free:
            file = min(free, key=lambda f: f.array.size)
        else:
            fd = os.memfd_create("weights")
            os.ftruncate(fd, num_bytes)
            file = _File(fd, np.frombuffer(mmap.mmap(fd, num_bytes), dtype=np.uint8))
            self._files.append(file)
        self._round.append(file)
        return file.array

    def put(self, num_bytes: int) -> SharedBytes:
        """The reference for readers to the first `num_bytes` of the memory taken last."""
        file = self._round[-1]
        return SharedBytes(file.pid, file.fd, file.inode, num_bytes)


class SharedReader:
    """The files of other processes that this one has mapped."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int, int], _File] = {}

    def read(self, where: SharedBytes) -> np.ndarray:
        """The bytes, read-only; they do not change until `keep` is called without them. Raises OSError: the process
        that wrote them is gone, or belongs to another user."""
        key = (where.pid, where.fd, where.inode)
        if key not in self._files:
            fd = os.open(f"/proc/{where.pid}/fd/{where.fd}", os.O_RDONLY | os.O_CLOEXEC)
            status = os.fstat(fd)
            if status.st_ino != where.inode or status.st_size < where.num_bytes:
                os.close(fd)
                raise FileNotFoundError(f"process {where.pid} is not the one that wrote them")
            mapped = mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ)
            self._files[key] = _File(fd, np.frombuffer(mapped, dtype=np.uint8), where.pid)
        self._files[key].lock(fcntl.LOCK_SH)
        return self._files[key].array[: where.num_bytes]

    def keep(self, needed: Iterable[SharedBytes]) -> None:
        """Release all files but `needed`. Other files of the same writers stay mapped for the next round."""
        keys = {(where.pid, where.fd, where.inode) for where in needed}
        writers = {pid for pid, _, _ in keys}
        for key, file in list(self._files.items()):
            if key not in keys:
                file.lock(fcntl.LOCK_UN)
                if key[0] not in writers:
                    del self._files[key]


def _unread(file: _File) -> bool:
    try:
        file.lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    file.lock(fcntl.LOCK_UN)
    return True


def machine() -> str:
    """An id that is equal for processes that can open each other's files."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')} {os.geteuid()}"
    except OSError:
        return f"process {os.getpid()}"  # on other systems nothing is shared
