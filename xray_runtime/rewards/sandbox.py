"""Processes that are limited from within before they run anything: for code that nobody vouches for.

A sandboxed process is the leader of a session of its own, in an empty temporary directory, with next to no environment,
no file of ours open, no processes or threads of its own, and limits on processor time, address space, open files and
the size of a file. Code that is not trusted changes no file, signals no process and opens no socket; where we are root
it works as nobody, who reads what root does. Whoever starts it ends its group.

It is no jail: code in it can read what its user may read, it runs in one process with the tests that judge it, and what
the filter of its system calls (`seccomp`) does not name is allowed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xray_runtime.processes import TAG
from xray_runtime.rewards.seccomp import seccomp_filter

NOBODY = 65534
FILE_BYTES = 2**24
OPEN_FILES = 64
STARTED = "started"
START_S, POLL_S = 60.0, 0.005

LIMITED = """
import json, resource, sys
limits, path = json.loads(sys.argv.pop())
for name, value in limits.items():
    resource.setrlimit(getattr(resource, name), (value, value))
sys.path[:] = path or sys.path
"""
"""What each begins with."""

AS_NOBODY = f"""
import ctypes, os
if os.geteuid() == 0:
    libc = ctypes.CDLL(None, use_errno=True)
    kept = libc.prctl(8, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
    os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(1 << 2, 1 << 2)
    if kept or libc.capset(header, sets):
        sys.exit("root's rights cannot be given up")
"""
"""Root's rights are given up, but for CAP_DAC_READ_SEARCH: Python's library may lie where root alone reads."""

FILTERED = """
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_char_p)]
def refuse(steps):
    libc = ctypes.CDLL(None)
    program = Program(len(steps) // 8, steps)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(program), 0, 0):
        sys.exit("the kernel takes no filter of system calls")
"""
"""Nothing more can be gained by what is run, and calls of `seccomp_filter` are refused."""

JUDGED = f"""{LIMITED}{AS_NOBODY}{FILTERED}
def judge():
    secret, steps, *sources = json.load(sys.stdin)
    verdict, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    refuse(bytes.fromhex(steps))
    os.write(verdict, b"{STARTED}")
    space = dict(__name__="__main__")
    for source in sources:
        exec(compile(source, "<reply>", "exec"), space)
    os.write(verdict, secret.encode())
judge()
"""
"""Runs the reply and then the tests; only where both end well it says the secret."""


@contextmanager
def sandboxed(
    program: str, limits: dict[str, int], directory: Path, path: list[str] | None = None, **streams: Any
) -> Iterator[subprocess.Popen[Any]]:
    """A limited process; when the block ends, so does its whole group.

    Args:
        program: its source, which begins with `LIMITED`.
        limits: name of a limit of `resource` → value.
        directory: where it works.
        path: where it finds modules; None: in the standard library alone.

    Raises:
        OSError: it cannot be started.
    """
    # Without a tag of the run it would outlive a run that is killed; without a seed sets would differ in order.
    environment = {name: os.environ[name] for name in (TAG,) if name in os.environ} | {"PYTHONHASHSEED": "0"}
    options = ["-B", "-s", "-P", *(["-S"] if path is None else [])]
    process = subprocess.Popen(
        [sys.executable, *options, "-c", program, json.dumps([limits, path])],
        cwd=directory,
        env=environment,
        start_new_session=True,
        close_fds=True,
        stderr=subprocess.DEVNULL,
        **streams,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def limits_of(memory_mb: int, cpu_s: float | None = None) -> dict[str, int]:
    """The limits of a process without children of its own."""
    limits = {
        "RLIMIT_AS": memory_mb * 2**20,
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_NPROC": 0,
        "RLIMIT_CORE": 0,
    }
    return limits if cpu_s is None else limits | {"RLIMIT_CPU": math.ceil(cpu_s)}


def passes(code: str, tests: str, limit_s: float, memory_mb: int) -> bool:
    """Whether `code` and then `tests` run to their end within the limits.

    Raises:
        OSError: the sandbox could not be set up.
    """
    secret, filter = uuid.uuid4().hex, seccomp_filter().hex()
    directory = Path(tempfile.mkdtemp(prefix="xray-sandbox-"))
    try:
        if os.geteuid() == 0:
            os.chown(directory, NOBODY, NOBODY)
        limits = limits_of(memory_mb, limit_s)
        streams: dict[str, Any] = {"stdin": subprocess.PIPE}
        with (
            tempfile.TemporaryFile() as verdict,
            sandboxed(JUDGED, limits, directory, stdout=verdict, **streams) as process,
        ):
            task = json.dumps([secret, filter, code, tests]).encode()
            # In a thread of its own: what does not read must not hold us up.
            threading.Thread(target=_feed, args=(process, task), daemon=True).start()
            # The limit is the code's: on a busy machine Python alone may take seconds to start.
            end = time.monotonic() + START_S
            while not os.fstat(verdict.fileno()).st_size and process.poll() is None and time.monotonic() < end:
                time.sleep(POLL_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
            verdict.seek(0)
            said = verdict.read(2 * len(STARTED) + len(secret)).decode("ascii", "replace")
        if not said.startswith(STARTED):
            raise OSError(f"the sandbox did not start (exit {process.returncode})")
        return said == STARTED + secret
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _feed(process: subprocess.Popen[Any], task: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):
        process.stdin.write(task)
        process.stdin.close()
