"""Seccomp filters, by which the kernel refuses system calls with EPERM.

`computing_filter` allows what computing needs. No call opens a file, makes a process or a thread, signals, traces, or
reaches a socket; only open descriptors can be read and written. `connecting_filter` refuses ways around Landlock:
sockets that are not TCP's, and calls that reach other processes. See `man 2 seccomp`, `man 4 bpf` and Linux's tables of
system calls.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
from collections.abc import Sequence
from typing import Any

LOAD, JUMP_EQUAL, JUMP_ANY_BIT, JUMP_FROM, AND, RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`; an argument has 8 bytes."""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
AT_EMPTY_PATH = 0x1000

ALLOWED: dict[str, tuple[int | None, int | None]] = {
    **{"read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "lseek": (8, 62), "close": (3, 57)},
    **{"fstat": (5, 80), "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72)},
    **{"mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226), "madvise": (28, 233)},
    **{"brk": (12, 214), "futex": (202, 98), "getrandom": (318, 278), "getpid": (39, 172), "gettid": (186, 178)},
    **{"rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132)},
    **{"nanosleep": (35, 101), "clock_nanosleep": (230, 115), "restart_syscall": (219, 128), "sched_yield": (24, 124)},
    **{"clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None)},
    **{"getrusage": (98, 165), "times": (100, 153), "exit": (60, 93), "exit_group": (231, 94)},
}
"""System call → its number on x86-64 and on aarch64; None if there is none."""
NEWFSTATAT = (262, 79)
"""The C library's replacement for `fstat`: with AT_EMPTY_PATH, for an open descriptor."""
FLAGS = 3
"""Index of its argument with the flags."""


REFUSED: dict[str, tuple[int, int]] = {
    **{"io_uring_setup": (425, 425), "ptrace": (101, 117), "pidfd_getfd": (438, 438), "bpf": (321, 280)},
    **{"process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "perf_event_open": (298, 241)},
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
}
"""System call → its numbers, as in `ALLOWED`."""
SOCKET = (41, 198)
X32_TABLE = 0x40000000
"""The first number of x86-64's second table, whose calls are the same."""
KIND_OF_SOCKET = 0xF
"""Bits of a socket's type without its flags."""
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38

Step = tuple[int, int, str, str]
"""(code, k, target if true, target if false); an empty target is the next step."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_char_p)]


def install(program: bytes) -> None:
    """Filter the system calls of this process and of those that it starts, which gain no privileges any more.

    Raises:
        OSError: the kernel refuses.
    """
    control(PR_SET_NO_NEW_PRIVS, 1, "takes no PR_SET_NO_NEW_PRIVS")
    control(PR_SET_SECCOMP, 2, "takes no seccomp filter", ctypes.byref(_Program(len(program) // 8, program)))


def control(option: int, value: int, fault: str, more: Any = 0) -> None:
    """`prctl`. Raises OSError with `fault`."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, more, 0, 0):
        raise OSError(f"a process {fault} here: {os.strerror(ctypes.get_errno())}")


def computing_filter(machine: str | None = None) -> bytes:
    """The program for code that computes, an array of `struct sock_filter`.

    Raises:
        OSError: the system calls of this machine are unknown.
    """
    machine, column = _known(machine)
    numbers = [number for row in ALLOWED.values() if (number := row[column]) is not None]
    return _assembled(
        machine,
        [
            # Calls of x86-64's x32 table have other numbers and are refused.
            *((JUMP_EQUAL, number, "allow", "") for number in numbers),
            (JUMP_EQUAL, NEWFSTATAT[column], "", "refuse"),
            (LOAD, ARGUMENTS + 8 * FLAGS, "", ""),
            (JUMP_ANY_BIT, AT_EMPTY_PATH, "allow", "refuse"),
        ],
    )


def connecting_filter(machine: str | None = None) -> bytes:
    """The program for a process that may open TCP connections, as `computing_filter`."""
    machine, column = _known(machine)
    return _assembled(
        machine,
        [
            (JUMP_FROM, X32_TABLE, "refuse", ""),
            *((JUMP_EQUAL, row[column], "refuse", "") for row in REFUSED.values()),
            (JUMP_EQUAL, SOCKET[column], "", "allow"),
            (LOAD, ARGUMENTS, "", ""),
            (JUMP_EQUAL, socket.AF_INET, "kind", ""),
            (JUMP_EQUAL, socket.AF_INET6, "kind", "refuse"),
            (LOAD, ARGUMENTS + 8, "kind:", ""),
            (AND, KIND_OF_SOCKET, "", ""),
            (JUMP_EQUAL, socket.SOCK_STREAM, "", "refuse"),
            # Landlock does not know MPTCP and SCTP.
            (LOAD, ARGUMENTS + 16, "", ""),
            (JUMP_EQUAL, 0, "allow", ""),
            (JUMP_EQUAL, socket.IPPROTO_TCP, "allow", "refuse"),
        ],
    )


def _known(machine: str | None) -> tuple[str, int]:
    """(machine, its column of numbers)."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(f"the sandbox knows no system calls of {machine}: it runs on {' and '.join(ARCHITECTURES)}")
    return machine, list(ARCHITECTURES).index(machine)


def _assembled(machine: str, steps: Sequence[Step]) -> bytes:
    """The program of steps that begin with the number of the call; a first target `name:` is the name of its step."""
    steps = [
        (LOAD, ARCHITECTURE, "", ""),
        (JUMP_EQUAL, ARCHITECTURES[machine], "", "kill"),
        (LOAD, NUMBER, "", ""),
        *steps,
    ]
    places = {true[:-1]: place for place, (_, _, true, _) in enumerate(steps) if true.endswith(":")}
    places |= {"allow": len(steps), "refuse": len(steps) + 1, "kill": len(steps) + 2}
    program = b""
    for place, (code, k, *targets) in enumerate(steps):
        to = [places[name] - place - 1 if name in places else 0 for name in targets]
        program += struct.pack("HBBI", code, *to, k)
    return program + b"".join(struct.pack("HBBI", RETURN, 0, 0, end) for end in (ALLOW, REFUSE, KILL))
