"""A seccomp filter: it allows the system calls for computing, and the kernel refuses all others with EPERM.

No call opens a file, makes a process or a thread, signals, traces, or reaches a socket; only open descriptors can be
read and written. See `man 2 seccomp`, `man 4 bpf` and Linux's tables of system calls.
"""

from __future__ import annotations

import platform
import struct

LOAD, JUMP_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
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


def seccomp_filter(machine: str | None = None) -> bytes:
    """The program, an array of `struct sock_filter`.

    Raises:
        OSError: the system calls of this machine are unknown.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(f"the sandbox knows no system calls of {machine}: it runs on {' and '.join(ARCHITECTURES)}")
    column = list(ARCHITECTURES).index(machine)
    numbers = [number for row in ALLOWED.values() if (number := row[column]) is not None]
    # (code, k, target if true, target if false); an empty target is the next step.
    steps: list[tuple[int, int, str, str]] = [
        (LOAD, ARCHITECTURE, "", ""),
        (JUMP_EQUAL, ARCHITECTURES[machine], "", "kill"),
        # Calls of x86-64's x32 table have other numbers and are refused.
        (LOAD, NUMBER, "", ""),
        *((JUMP_EQUAL, number, "allow", "") for number in numbers),
        (JUMP_EQUAL, NEWFSTATAT[column], "", "refuse"),
        (LOAD, ARGUMENTS + 8 * FLAGS, "", ""),
        (JUMP_ANY_BIT, AT_EMPTY_PATH, "allow", "refuse"),
    ]
    ends = {"allow": len(steps), "refuse": len(steps) + 1, "kill": len(steps) + 2}
    program = b""
    for place, (code, k, true, false) in enumerate(steps):
        to = [ends[name] - place - 1 if name else 0 for name in (true, false)]
        program += struct.pack("HBBI", code, *to, k)
    return program + b"".join(struct.pack("HBBI", RETURN, 0, 0, end) for end in (ALLOW, REFUSE, KILL))
