"""Seccomp filters, by which the kernel refuses all system calls but those of a list (`syscalls`).

`computing_filter` allows what computing needs: only open descriptors can be read and written. `agent_filter` allows
what programs need that keep files, start processes and talk to the gateway, by the call and, where one call does many
things, by its argument. See `man 2 seccomp` and `man 4 bpf`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from xray_runtime.kernel.confine.syscalls import AGENT, BY_ARGUMENT, COMPUTING, IN_OWN_ROOM, NEWEST, UNKNOWN, Numbers

LOAD, JUMP_EQUAL, JUMP_ANY_BIT, JUMP_ABOVE, RETURN = 0x20, 0x15, 0x45, 0x25, 0x06
ALLOW, ERROR, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`; an argument has 8 bytes, of which the kernel reads the first 4 where we ask."""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_TABLE = 0x40000000
"""The first number of x86-64's second table, whose calls are the same."""
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
REFUSED, OLDER_KERNEL = ERROR | errno.EPERM, ERROR | errno.ENOSYS

AT_EMPTY_PATH = 0x1000
NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
MSG_FASTOPEN = 0x20000000
"""It connects, unseen by Landlock."""
NETLINK_ROUTE = 0
IOCTLS = [
    *(0x5401, 0x5402, 0x5403, 0x5404, 0x5409, 0x540A, 0x540B, 0x540E, 0x540F, 0x5410, 0x5411, 0x5413, 0x5414, 0x5422),
    *(0x5429, 0x5441, 0x80045430, 0x40045431, 0x80045439, 0x802C542A, 0x402C542B, 0x402C542C, 0x402C542D),
    *(0x541B, 0x5421, 0x5450, 0x5451, 0x8905, 0x8910, 0x8912, 0x8913, 0x8915, 0x8933),
]
"""Terminals of one's own (without TIOCSTI, which types for others); FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; SIOCATMARK,
and names, addresses and flags of interfaces."""
FCNTLS = [*range(12), 36, 37, 38, *range(1030, 1035)]
"""Without leases and notifications, which reach other users of a file."""
PRCTLS = [1, 2, 3, 4, 15, 16, 21, 23, 29, 30, 36, 37, 38, 39, 41, 42, 0x53564D41]
"""Signal at the parent's death, being dumpable, name, timer slack, subreaper, no new privileges, huge pages; names of
memory."""

Step = tuple[int, int, int, int]
"""(code, k, steps to jump over if true, if false)."""


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
    # The C library's replacement for `fstat`: with AT_EMPTY_PATH, for an open descriptor.
    status = _when(_bits(3, AT_EMPTY_PATH, ALLOW, REFUSED), BY_ARGUMENT["newfstatat"][column])
    return _assembled(machine, [*_each(COMPUTING.values(), column, ALLOW), *status])


def agent_filter(has_own_room: bool, machine: str | None = None) -> bytes:
    """The program for agents' programs, as `computing_filter`.

    Args:
        has_own_room: they have files, processes and a network of their own; otherwise Landlock keeps them from those of
            others, as far as it can, and only TCP connections are allowed.
    """
    machine, column = _known(machine)
    steps = [
        *_each(UNKNOWN.values(), column, OLDER_KERNEL),
        (JUMP_ABOVE, NEWEST, 0, 2),
        (JUMP_ABOVE, X32_TABLE - 1, 1, 0),
        *_end(OLDER_KERNEL),
    ]
    for call, body in _by_argument(has_own_room).items():
        steps += _when(body, BY_ARGUMENT[call][column])
    allowed = AGENT | (IN_OWN_ROOM if has_own_room else {})
    return _assembled(machine, [*steps, *_each(allowed.values(), column, ALLOW)])


def _by_argument(has_own_room: bool) -> dict[str, list[Step]]:
    """Call → steps that end with the answer to it."""
    self_only = _equal(0, [0], REFUSED)
    rules = {
        "clone": _bits(0, NEW_NAMESPACES, REFUSED, ALLOW),
        "ioctl": _equal(1, IOCTLS, ERROR | errno.ENOTTY),
        "fcntl": _equal(1, FCNTLS, REFUSED),
        "prctl": _equal(0, PRCTLS, REFUSED),
        "prlimit64": self_only,
        "sched_setaffinity": self_only,
        # The priority of a process (0), namely this one.
        "setpriority": [*_unless(0, 0, REFUSED), *_equal(1, [0], REFUSED)],
        "socketpair": _equal(0, [socket.AF_UNIX], REFUSED),
        "sendto": _bits(3, MSG_FASTOPEN, REFUSED, ALLOW),
        "sendmsg": _bits(2, MSG_FASTOPEN, REFUSED, ALLOW),
        "sendmmsg": _bits(3, MSG_FASTOPEN, REFUSED, ALLOW),
    }
    # Other families, such as AF_VSOCK, reach outside every network.
    networks = [socket.AF_INET, socket.AF_INET6]
    if has_own_room:
        local = [*_unless(2, NETLINK_ROUTE, REFUSED), *_equal(0, [socket.AF_NETLINK], REFUSED)]
        return rules | {"socket": [*_allow_if(0, [socket.AF_UNIX, *networks]), *local]}
    # Landlock knows neither datagrams nor MPTCP and SCTP.
    stream = [*_kind_unless(socket.SOCK_STREAM), *_equal(2, [0, socket.IPPROTO_TCP], REFUSED)]
    return rules | {"socket": [*_refuse_unless_any(0, networks), *stream]}


def _end(answer: int) -> list[Step]:
    return [(RETURN, answer, 0, 0)]


def _load(argument: int) -> Step:
    return (LOAD, ARGUMENTS + 8 * argument, 0, 0)


def _allow_if(argument: int, values: Iterable[int]) -> list[Step]:
    """ALLOW if the argument is one of `values`."""
    pairs = [step for value in values for step in ((JUMP_EQUAL, value, 0, 1), *_end(ALLOW))]
    return [_load(argument), *pairs]


def _equal(argument: int, values: Iterable[int], otherwise: int) -> list[Step]:
    return [*_allow_if(argument, values), *_end(otherwise)]


def _unless(argument: int, value: int, answer: int) -> list[Step]:
    """`answer` unless the argument is `value`."""
    return [_load(argument), (JUMP_EQUAL, value, 1, 0), *_end(answer)]


def _refuse_unless_any(argument: int, values: Sequence[int]) -> list[Step]:
    jumps = [(JUMP_EQUAL, value, len(values) - number, 0) for number, value in enumerate(values)]
    return [_load(argument), *jumps, *_end(REFUSED)]


def _kind_unless(kind: int) -> list[Step]:
    """REFUSED unless the type of a socket without its flags is `kind`."""
    flags = socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    return _refuse_unless_any(1, [kind | some for some in (0, socket.SOCK_NONBLOCK, socket.SOCK_CLOEXEC, flags)])


def _bits(argument: int, bits: int, answer: int, otherwise: int) -> list[Step]:
    """`answer` if the argument has any of `bits`."""
    return [_load(argument), (JUMP_ANY_BIT, bits, 0, 1), *_end(answer), *_end(otherwise)]


def _when(body: Sequence[Step], *numbers: int | None) -> list[Step]:
    """`body` for each call with one of the numbers."""
    steps: list[Step] = []
    for number in numbers:
        if number is not None:
            steps += [(JUMP_EQUAL, number, 0, len(body)), *body]
    return steps


def _each(calls: Iterable[Numbers], column: int, answer: int) -> list[Step]:
    return _when(_end(answer), *(numbers[column] for numbers in calls))


def _known(machine: str | None) -> tuple[str, int]:
    """(machine, its column of numbers)."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(f"the sandbox knows no system calls of {machine}: it runs on {' and '.join(ARCHITECTURES)}")
    return machine, list(ARCHITECTURES).index(machine)


def _assembled(machine: str, steps: Sequence[Step]) -> bytes:
    """The program of steps that begin with the number of the call; what no step answers is refused."""
    first = [(LOAD, ARCHITECTURE, 0, 0), (JUMP_EQUAL, ARCHITECTURES[machine], 1, 0), *_end(KILL), (LOAD, NUMBER, 0, 0)]
    every = [*first, *steps, *_end(REFUSED)]
    return b"".join(struct.pack("HBBI", code, true, false, k) for code, k, true, false in every)
