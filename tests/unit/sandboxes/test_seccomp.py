"""The filter's numbers against the kernel's own tables, and its jumps."""

from __future__ import annotations

import itertools
import re
import struct
from pathlib import Path

import pytest

from xray_runtime.sandboxes.seccomp import ALLOWED, NEWFSTATAT, REFUSED, SOCKET, computing_filter, connecting_filter

TABLES = {
    0: [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")],
    1: [Path("/usr/include/asm-generic/unistd.h")],
}


def test_steps_jump_within_the_program() -> None:
    for machine, program in itertools.product(("x86_64", "aarch64"), (computing_filter, connecting_filter)):
        steps = list(struct.iter_unpack("HBBI", program(machine)))
        for place, (_, true, false, _) in enumerate(steps):
            assert place + 1 + max(true, false) <= len(steps) - 1 or place >= len(steps) - 3
    with pytest.raises(OSError, match=r"the sandbox knows no system calls of sparc: it runs on x86_64 and aarch64$"):
        computing_filter("sparc")


@pytest.mark.parametrize("column", TABLES)
def test_numbers_are_the_kernels(column: int) -> None:
    table = next((path for path in TABLES[column] if path.exists()), None)
    if table is None:
        pytest.skip("no header of the kernel is installed")
    text = table.read_text()
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    # Where 32-bit systems have calls of their own, the generic table names them by both.
    known = {name.removeprefix("3264_"): number for name, number in known.items()} | known
    for name, numbers in (ALLOWED | REFUSED | {"newfstatat": NEWFSTATAT, "socket": SOCKET}).items():
        number = numbers[column]
        generic = known.get(name, known.get({"newfstatat": "fstatat"}.get(name, name)))
        assert number is None or generic == number, name
        assert number is not None or name not in known, name
