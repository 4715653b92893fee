"""A seccomp filter: system calls that code nobody vouches for has no use for, refused by the kernel with EPERM.

Signals and whatever else reaches into other processes, sockets, and every change of a file. It is a list of what is
refused: what it forgets is allowed. `man 2 seccomp`, `man 4 bpf`; numbers from Linux's system call tables.
"""

from __future__ import annotations

import platform
import struct

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`; an argument has 8 bytes."""
WRITES = 0o1 | 0o2 | 0o100 | 0o1000
"""O_WRONLY, O_RDWR, O_CREAT, O_TRUNC."""
X32 = 0x40000000
"""From here on another table of the same calls, on x86-64."""

# kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, ptrace, process_vm_readv, process_vm_writev, prlimit64,
# socket; truncate, ftruncate; mkdirat, unlinkat, renameat, renameat2, linkat, symlinkat, mknodat, fchmodat, fchownat,
# fchmod, fchown, utimensat, setxattr, lsetxattr, mount; on x86-64 those without "at" too.
_COMMON = (424, 425, 434, 437, 438, 452)
"""pidfd_send_signal, io_uring_setup, pidfd_open, openat2, pidfd_getfd, fchmodat2: everywhere the same."""
_REFUSED = {
    "x86_64": (
        *(62, 200, 234, 129, 297, 101, 310, 311, 302, 41, 76, 77),
        *(258, 263, 264, 316, 265, 266, 259, 268, 260, 91, 93, 280, 188, 189, 165),
        *(82, 83, 84, 85, 86, 87, 88, 90, 92, 94, 132, 133, 235, 261),
    ),
    "aarch64": (
        *(129, 130, 131, 138, 240, 117, 270, 271, 261, 198, 45, 46),
        *(34, 35, 38, 276, 37, 36, 33, 53, 54, 52, 55, 88, 5, 6, 40),
    ),
}
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_OPENS = {"x86_64": ((257, 2), (2, 1)), "aarch64": ((56, 2),)}
"""openat, open: number, and which argument has the flags."""


def seccomp_filter(machine: str | None = None) -> bytes:
    """The program, an array of `struct sock_filter`.

    Raises:
        OSError: the system calls of this machine are not known here.
    """
    machine = machine or platform.machine()
    if machine not in _REFUSED:
        raise OSError(f"the sandbox does not support {machine}")
    # (code, k, where to go if true, if false); places are names until all are known.
    steps: list[tuple[int, int, str, str]] = [
        (LOAD, ARCHITECTURE, "", ""),
        (JUMP_EQUAL, _ARCHITECTURES[machine], "", "kill"),
        (LOAD, NUMBER, "", ""),
        (JUMP_AT_LEAST, X32, "refuse", ""),
        *((JUMP_EQUAL, number, "refuse", "") for number in (*_COMMON, *_REFUSED[machine])),
    ]
    for number, argument in _OPENS[machine]:
        steps.append((JUMP_EQUAL, number, "", f"after {number}"))
        steps.append((LOAD, ARGUMENTS + 8 * argument, "", ""))
        steps.append((JUMP_ANY_BIT, WRITES, "refuse", "allow"))
    ends = {"allow": len(steps), "refuse": len(steps) + 1, "kill": len(steps) + 2}
    program = b""
    for place, (code, k, true, false) in enumerate(steps):
        to = [2 if name.startswith("after") else ends[name] - place - 1 if name else 0 for name in (true, false)]
        program += struct.pack("HBBI", code, *to, k)
    return program + b"".join(struct.pack("HBBI", RETURN, 0, 0, end) for end in (ALLOW, REFUSE, KILL))
