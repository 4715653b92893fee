"""Landlock: a process gives up files and connections, for itself and all that it starts. See `man 7 landlock`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""System calls, of the same numbers on x86-64 and aarch64."""
VERSION = 1
"""Flag of CREATE_RULESET that asks for the version."""
UNDER_PATH, ON_PORT = 1, 2
FILE_RIGHTS = {1: 2**13 - 1, 2: 2**14 - 1, 3: 2**15 - 1, 5: 2**16 - 1}
"""First version with these rights → their bits."""
NETWORK_VERSION, SCOPES_VERSION = 4, 6
BIND, CONNECT = 1, 2
SCOPES = 3
"""Abstract Unix sockets of others, and signals to others."""
EXECUTE, WRITE_FILE, READ_FILE, READ_DIRECTORY, TRUNCATE, IOCTL = 1, 2, 4, 8, 2**14, 2**15
READ = EXECUTE | READ_FILE | READ_DIRECTORY
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL
"""Rights that make sense for what is no directory."""


def version() -> int:
    """The kernel's version of Landlock; 0 if it has none."""
    return max(0, _libc().syscall(CREATE_RULESET, None, 0, VERSION))


def restrict(readable: Iterable[str], writable: Iterable[str], port: int | None) -> None:
    """Keep only reading and executing below some paths, anything below others, and TCP connections to one port.

    Paths that do not exist are left out. Before version 4 of Landlock, connections are not limited.

    Raises:
        OSError: the kernel refuses.
    """
    libc, found = _libc(), version()
    rights = max(bits for first, bits in FILE_RIGHTS.items() if first <= found)
    network = BIND | CONNECT if found >= NETWORK_VERSION else 0
    attributes = struct.pack("QQQ", rights, network, SCOPES if found >= SCOPES_VERSION else 0)
    # An older kernel knows a shorter structure.
    size = 8 if not network else 16 if found < SCOPES_VERSION else 24
    ruleset = _checked(libc.syscall(CREATE_RULESET, attributes, size, 0))
    for paths, allowed in ((readable, READ), (writable, rights)):
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                file = os.open(path, os.O_PATH | os.O_CLOEXEC)
                bits = allowed if os.path.isdir(path) else allowed & OF_A_FILE
                _checked(libc.syscall(ADD_RULE, ruleset, UNDER_PATH, struct.pack("=Qi", bits & rights, file), 0))
                os.close(file)
    if port is not None and network:
        _checked(libc.syscall(ADD_RULE, ruleset, ON_PORT, struct.pack("QQ", CONNECT, port), 0))
    _checked(libc.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result
