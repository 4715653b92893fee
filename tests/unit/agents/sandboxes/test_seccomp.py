"""The filters' numbers against the kernel's own tables, and their answers to calls, as the kernel computes them."""

from __future__ import annotations

import errno
import itertools
import re
import struct
from pathlib import Path

import pytest

from xray_runtime.kernel.confine import syscalls
from xray_runtime.kernel.confine.seccomp import ALLOW, ARCHITECTURES, ERROR, KILL, agent_filter, computing_filter

HEADERS = {
    0: [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")],
    1: [Path("/usr/include/asm-generic/unistd.h")],
}
TABLES = [syscalls.AGENT, syscalls.IN_OWN_ROOM, syscalls.BY_ARGUMENT, syscalls.UNKNOWN]
NUMBERS = {name: numbers for each in TABLES for name, numbers in each.items()}
REFUSED, OLDER, NO_TERMINAL = ERROR | errno.EPERM, ERROR | errno.ENOSYS, ERROR | errno.ENOTTY


def answer(program: bytes, number: int, *arguments: int, architecture: int) -> int:
    """The kernel's answer; see `Documentation/networking/filter.rst`."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    steps = list(struct.iter_unpack("HBBI", program))
    place = value = 0
    while True:
        code, true, false, k = steps[place]
        place += 1
        if code == 0x06:
            return k
        if code == 0x20:
            value = struct.unpack_from("=I", data, k)[0]
        else:
            holds = {0x15: value == k, 0x25: value > k, 0x35: value >= k, 0x45: bool(value & k)}[code]
            place += true if holds else false


@pytest.mark.parametrize("column", HEADERS)
def test_numbers_are_the_kernels(column: int) -> None:
    table = next((path for path in HEADERS[column] if path.exists()), None)
    if table is None:
        pytest.skip("no header of the kernel is installed")
    text = table.read_text()
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    # Where 32-bit systems have calls of their own, the generic table names them by both.
    known = {name.removeprefix("3264_"): number for name, number in known.items()} | known
    for name, numbers in NUMBERS.items():
        number = numbers[column]
        generic = known.get(name, known.get({"newfstatat": "fstatat"}.get(name, name)))
        # Installed headers may be older than the call.
        assert number is None or generic == number or number > max(known.values()) - 2, name
        assert number is not None or name not in known, name


NAMESPACES = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
CALLS = [
    *((name, (), REFUSED, REFUSED) for name in ("shmget=29,194", "msgget=68,186", "semget=64,190", "mq_open=240,180")),
    *((name, (), REFUSED, REFUSED) for name in ("unshare=272,97", "setns=308,268", "mount=165,40", "chroot=161,51")),
    *((name, (), REFUSED, REFUSED) for name in ("ptrace=101,117", "process_vm_readv=310,270", "kcmp=312,272")),
    *((name, (), REFUSED, REFUSED) for name in ("io_uring_setup=425,425", "userfaultfd=323,282", "bpf=321,280")),
    *((name, (), REFUSED, REFUSED) for name in ("pidfd_open=434,434", "pidfd_getfd=438,438", "keyctl=250,219")),
    *((name, (), REFUSED, REFUSED) for name in ("inotify_init1=294,26", "fanotify_init=300,262", "acct=163,89")),
    *((name, (), REFUSED, REFUSED) for name in ("name_to_handle_at=303,264", "open_by_handle_at=304,265")),
    *((name, (), REFUSED, REFUSED) for name in ("memfd_secret=447,447", "pidfd_send_signal=424,424")),
    *((name, (), REFUSED, REFUSED) for name in ("perf_event_open=298,241", "kexec_load=246,104", "sync=162,81")),
    *((f"new={number},{number}", (), OLDER, OLDER) for number in (453, 462, 463, 468, 600, 10_000)),
    ("clone3", (), OLDER, OLDER),
    ("memfd_create", (), OLDER, OLDER),
    ("open=2,-", (), ALLOW, ALLOW),
    ("newfstatat", (), ALLOW, ALLOW),
    ("kill", (), ALLOW, ALLOW),
    *((name, (), ALLOW, REFUSED) for name in syscalls.IN_OWN_ROOM),
    ("clone", (0x3D0F00,), ALLOW, ALLOW),
    *(("clone", (flag | 17,), REFUSED, REFUSED) for flag in NAMESPACES if flag != 0x80),
    ("ioctl", (0, 0x5401), ALLOW, ALLOW),
    ("ioctl", (0, 0x5412), NO_TERMINAL, NO_TERMINAL),
    # The kernel reads 32 bits.
    ("ioctl", (0, 0x7_0000_5412), NO_TERMINAL, NO_TERMINAL),
    ("ioctl", (0, 0x541C), NO_TERMINAL, NO_TERMINAL),
    ("ioctl", (0, 0x40086602), NO_TERMINAL, NO_TERMINAL),
    ("fcntl", (0, 4), ALLOW, ALLOW),
    ("fcntl", (0, 1024), REFUSED, REFUSED),
    ("fcntl", (0, 1026), REFUSED, REFUSED),
    ("prctl", (15,), ALLOW, ALLOW),
    ("prctl", (35,), REFUSED, REFUSED),
    ("prctl", (62,), REFUSED, REFUSED),
    ("prlimit64", (0,), ALLOW, ALLOW),
    ("prlimit64", (77,), REFUSED, REFUSED),
    ("sched_setaffinity", (77,), REFUSED, REFUSED),
    ("setpriority", (0, 0), ALLOW, ALLOW),
    ("setpriority", (0, 77), REFUSED, REFUSED),
    ("setpriority", (2, 0), REFUSED, REFUSED),
    ("socketpair", (1,), ALLOW, ALLOW),
    ("socketpair", (16,), REFUSED, REFUSED),
    ("sendto", (0, 0, 0, 0x4000), ALLOW, ALLOW),
    ("sendto", (0, 0, 0, 0x20004000), REFUSED, REFUSED),
    ("sendmsg", (0, 0, 0x20000000), REFUSED, REFUSED),
    ("sendmmsg", (0, 0, 0, 0x20000000), REFUSED, REFUSED),
    ("socket", (1, 1, 0), ALLOW, REFUSED),
    ("socket", (2, 0x80801, 0), ALLOW, ALLOW),
    ("socket", (10, 1, 6), ALLOW, ALLOW),
    ("socket", (2, 2, 0), ALLOW, REFUSED),
    ("socket", (2, 1, 262), ALLOW, REFUSED),
    ("socket", (16, 3, 0), ALLOW, REFUSED),
    *(("socket", (family, kind, protocol), REFUSED, REFUSED) for family, kind, protocol in [(16, 3, 9), (40, 1, 0)]),
    *(("socket", (family, 3, 0), REFUSED, REFUSED) for family in (17, 38, 21, 29, 31, 44, 0, 3)),
]


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_answers_of_the_agents_filter(machine: str) -> None:
    column, architecture = list(ARCHITECTURES).index(machine), ARCHITECTURES[machine]
    programs = [agent_filter(True, machine), agent_filter(False, machine)]
    for name, arguments, *expected in CALLS:
        number = (NUMBERS.get(name) or next(iter(syscalls.table(name).values())))[column]
        if number is None:
            continue
        found = [answer(program, number, *arguments, architecture=architecture) for program in programs]
        assert found == expected, (name, arguments)
        x32 = [answer(program, number | 0x40000000, *arguments, architecture=architecture) for program in programs]
        assert x32 == [REFUSED] * 2, name
        assert answer(programs[0], number, *arguments, architecture=0x40000003) == KILL


def test_computing_reaches_nothing() -> None:
    program = computing_filter("x86_64")
    allowed = {number for number in range(600) if answer(program, number, architecture=0xC000003E) == ALLOW}
    assert allowed == {numbers[0] for numbers in syscalls.COMPUTING.values()}
    # `fstat` of an open descriptor, but no path.
    assert answer(program, 262, 3, 0, 0, 0x1000, architecture=0xC000003E) == ALLOW
    assert answer(program, 262, 3, 0, 0, 0, architecture=0xC000003E) == REFUSED


def test_programs_end_and_fit() -> None:
    for machine, has_own_room in itertools.product(ARCHITECTURES, (True, False)):
        steps = list(struct.iter_unpack("HBBI", agent_filter(has_own_room, machine)))
        assert len(steps) < 4096
        jumps = [(place, max(true, false)) for place, (code, true, false, _) in enumerate(steps) if code & 7 == 5]
        assert all(place + 1 + over < len(steps) for place, over in jumps)
        assert steps[-1][0] == 0x06
    with pytest.raises(OSError, match=r"the sandbox knows no system calls of sparc: it runs on x86_64 and aarch64$"):
        computing_filter("sparc")
