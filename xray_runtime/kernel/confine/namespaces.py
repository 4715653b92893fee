"""Files, processes and a network of one's own by Linux's namespaces, as bubblewrap makes them, for any user.

The new root has nothing but what is bound into it, read-only, and memory to write to. See `man 7 user_namespaces`,
`man 2 pivot_root` and `man 2 mount_setattr` (Linux 5.12).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import signal
import socket
import struct
from collections.abc import Iterable
from typing import Any

NEW_ALL = 0x7E020000
"""Mounts, control groups, host name, System V's objects, users, processes and network."""
NOBODY = 65534
"""Its user and group inside."""
BIND, RECURSIVE, PRIVATE = 4096, 16384, 1 << 18
NO_SUID, NO_DEVICES = 2, 4
DETACH = 2
MOUNT_SETATTR, PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
READ_ONLY, ATTR_NO_SUID, ATTR_NO_DEVICES, AT_RECURSIVE = 1, 2, 4, 0x8000
AT_WORKING_DIRECTORY = -100
SET_FLAGS, GET_FLAGS, IS_UP = 0x8914, 0x8913, 1
PR_SET_DEATH_SIGNAL, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
CAPABILITIES, CAPABILITY_VERSION = 64, 0x20080522
INODES_PER_MB = 256


def enter() -> None:
    """Become a user without rights outside, in namespaces of one's own; children get the one of processes.

    Raises:
        OSError: the kernel or its administrator refuses.
    """
    user, group = os.geteuid(), os.getegid()
    _checked(_libc().unshare(NEW_ALL), "unshare")
    for name, content in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content)


def start_child() -> None:
    """Go on in a child, the first of the new processes; this process waits for it, and ends as it does."""
    child = os.fork()
    if child:
        os._exit(exit_code(os.waitpid(child, 0)[1]))
    _libc().prctl(PR_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getpid() != 1:
        raise OSError("the namespace of processes is not new")


def exit_code(status: int) -> int:
    """A shell's exit code of a process that ended with `status`."""
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def make_root(root: str, readable: Iterable[tuple[str, str]], devices: Iterable[str], home: str, mb: int) -> None:
    """Make a new root in the directory `root` and enter it; the old root can no longer be reached.

    Args:
        readable: (path outside, path inside) of what can be read; missing paths are left out.
        devices: devices that can be used.
        home: directory to write to, in /tmp; it becomes the working directory.
        mb: size of /tmp, and of /dev/shm.

    Raises:
        OSError: the kernel refuses.
    """
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    _mount("tmpfs", root, "tmpfs", NO_SUID | NO_DEVICES, "mode=755,size=1m")
    # First, since what is bound may be below.
    size = f"mode=1777,size={mb}m,nr_inodes={INODES_PER_MB * mb}"
    for path in ("/tmp", "/dev/shm"):
        _own("tmpfs", root + path, "tmpfs", size)
    bound: list[str] = []
    for source, target in sorted(readable, key=lambda pair: pair[1]):
        if os.path.exists(source) and not any(os.path.commonpath([target, above]) == above for above in bound):
            bound.append(target)
            _bind(source, root + target, READ_ONLY | ATTR_NO_SUID | ATTR_NO_DEVICES)
    for device in devices:
        _bind(device, root + device, READ_ONLY | ATTR_NO_SUID)
    for name, number in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{number}", f"{root}/dev/{name}")
    _own("devpts", f"{root}/dev/pts", "devpts", "newinstance,ptmxmode=0666,mode=620", NO_SUID)
    os.symlink("pts/ptmx", f"{root}/dev/ptmx")
    _own("proc", f"{root}/proc", "proc")
    # Root outside could write to the kernel's settings.
    _restrict(f"{root}/proc", READ_ONLY)
    os.makedirs(root + home, exist_ok=True)
    _restrict(root, READ_ONLY, is_recursive=False)
    os.chdir(root)
    # The old root is put over the new one, and taken away.
    _checked(_libc().syscall(PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    _checked(_libc().umount2(b".", DETACH), "umount2")
    os.chdir(home)


def start_loopback() -> None:
    """Let the addresses of one's own network be used, and name the machine."""
    socket.sethostname("sandbox")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16xH14x", fcntl.ioctl(one, GET_FLAGS, request))[0]
        fcntl.ioctl(one, SET_FLAGS, struct.pack("16sH14x", b"lo", flags | IS_UP))


def give_up_rights() -> None:
    """Lose all capabilities for good, and keep others from looking into this process."""
    libc = _libc()
    for capability in range(CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    _checked(libc.capset(struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)), "capset")
    _checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _checked(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")


def _bind(source: str, target: str, attributes: int) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "w").close()
    _mount(source, target, None, BIND | RECURSIVE)
    _restrict(target, attributes)


def _own(source: str, target: str, kind: str, data: str | None = None, flags: int = NO_SUID | NO_DEVICES) -> None:
    os.makedirs(target, exist_ok=True)
    _mount(source, target, kind, flags, data)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    _checked(_libc().mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]), f"mount of {target}")


def _restrict(path: str, attributes: int, is_recursive: bool = True) -> None:
    """Add attributes to a mount, and to those below it."""
    request, flags = struct.pack("QQQQ", attributes, 0, 0, 0), AT_RECURSIVE if is_recursive else 0
    result = _libc().syscall(
        MOUNT_SETATTR, AT_WORKING_DIRECTORY, os.fsencode(path), flags, request, ctypes.c_size_t(len(request))
    )
    _checked(result, f"mount_setattr of {path}")


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result < 0:
        raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")
