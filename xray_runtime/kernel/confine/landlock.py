"""Landlock: a process gives up files, connections and signals, for itself and all that it starts. See
`man 7 landlock`."""

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
NEEDED_VERSION = 6
"""Linux 6.12, the first that keeps signals from others and knows connections, truncation and devices."""
UNDER_PATH, ON_PORT = 1, 2
RIGHTS = 2**16 - 1
BIND, CONNECT = 1, 2
SCOPES = 3
"""Abstract Unix sockets of others, and signals to others."""
EXECUTE, WRITE_FILE, READ_FILE, READ_DIRECTORY, TRUNCATE, IOCTL = 1, 2, 4, 8, 2**14, 2**15
READ = EXECUTE | READ_FILE | READ_DIRECTORY
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL
"""Rights that apply to files that are not directories."""


def version() -> int:
    """The kernel's version of Landlock; 0 if it has none."""
    number: int = _libc().syscall(CREATE_RULESET, None, 0, VERSION)
    return max(0, number)


def restrict(readable: Iterable[str], writable: Iterable[str], port: int | None) -> None:
    """Keep only reading and executing below some paths, anything below others, and TCP connections to one port.

    Paths that do not exist are left out.

    Raises:
        OSError: the kernel refuses, or is older than `NEEDED_VERSION`.
    """
    libc, attributes = _libc(), struct.pack("QQQ", RIGHTS, BIND | CONNECT, SCOPES)
    ruleset = _checked(libc.syscall(CREATE_RULESET, attributes, len(attributes), 0))
    for paths, allowed in ((readable, READ), (writable, RIGHTS)):
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                file = os.open(path, os.O_PATH | os.O_CLOEXEC)
                bits = allowed if os.path.isdir(path) else allowed & OF_A_FILE
                _checked(libc.syscall(ADD_RULE, ruleset, UNDER_PATH, struct.pack("=Qi", bits, file), 0))
                os.close(file)
    if port is not None:
        _checked(libc.syscall(ADD_RULE, ruleset, ON_PORT, struct.pack("QQ", CONNECT, port), 0))
    _checked(libc.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result
