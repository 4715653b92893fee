"""A process that forks children for code of replies and their tests; `CodeSandbox` starts it.

Python's library is loaded once. Each question on stdin is a `HEADER` and two texts with the lengths in it. Each answer
is one JSON line on stdout: {"passed": bool, "why": text}, {"unusable": why} for tests, or {"error": why}, after which
this process ends. The first line says that it is ready.

    TESTS    the code, and the tests, which run in another process (`judge`)
    CASE     the code, and the input of the program, whose output goes to the file OUTPUT

This process only reads headers; each text is read by the child that needs it. So no reply is forked from a process that
knows tests, expected output or another reply.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import random
import resource
import select
import signal
import site
import struct
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from xray_runtime.kernel.confine.seccomp import computing_filter, control, install
from xray_runtime.rewards.code import judge, reply
from xray_runtime.rewards.code.values import Channel

USES: tuple[str, ...] = ()
"""Only modules of the standard library are imported by name here, and a key has Python's version."""

HEADER = struct.Struct("<BQQdQ")
"""TESTS or CASE, bytes of both texts, seconds, bytes of memory besides Python's library."""
TESTS, CASE = 0, 1
NOBODY = 65534
OUTPUT_BYTES = 2**24
"""Limit of a program's output."""
ANSWERS = 1
"""File descriptor for answers."""
NOT_LOADED = (
    "antigravity distutils ensurepip idlelib lib2to3 pydoc_data readline test this tkinter turtle turtledemo venv"
)
"""Modules with side effects, or for a screen. A reply cannot load them later, since it cannot open files."""
LOADED_TOO = """collections.abc concurrent.futures.thread email.message email.parser encodings.ascii encodings.idna
encodings.latin_1 encodings.utf_16 encodings.utf_32 html.parser importlib.metadata importlib.resources json.decoder
logging.handlers multiprocessing.pool os.path unittest.mock urllib.parse urllib.request xml.dom.minidom
xml.etree.ElementTree xml.sax"""
PR_SET_PDEATHSIG, CLONE_NEWUSER = 1, 0x10000000
FREE = 64
"""Descriptors are first moved to this number and above."""

Prepared = tuple[list[int], Callable[[], Any]]


class _Server:
    """State that is prepared before the first question.

    Args:
        output: file descriptor for the output of programs.
    """

    def __init__(self, output: int) -> None:
        self._output = output
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._filter = computing_filter()
        self._nothing = os.open(os.devnull, os.O_RDWR)
        self._pid = os.getpid()
        self._address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

    def tests(self, sizes: tuple[int, int], limit_s: float, memory: int) -> None:
        (requests, ask), (answers, answer) = os.pipe(), os.pipe()
        streams = [self._nothing] * 3

        def code() -> Prepared:
            text = _read(sizes[0]).decode(errors="surrogatepass")
            return [*streams, requests, answer], lambda: reply.answer(text, Channel(3, 4))

        def tests() -> Prepared:
            text = _read(sizes[1]).decode(errors="surrogatepass")
            return [*streams, answers, ask, ANSWERS], lambda: judge.Judge(Channel(3, 4), 5).run(text)

        children = [self._fork(child, memory) for child in (code, tests)]
        for end in (requests, ask, answers, answer):
            os.close(end)
        status = _end(children[1], limit_s)
        _end(children[0], 0.0)
        # With exit code 0, the process of the tests has answered.
        if status is None:
            _say(passed=False, why=f"no verdict within limit_s = {limit_s:g}")
        elif status:
            _say(passed=False, why=f"the tests ended with {_ending(status)}")

    def case(self, sizes: tuple[int, int], limit_s: float, memory: int) -> None:
        os.ftruncate(self._output, 0)
        os.lseek(self._output, 0, os.SEEK_SET)

        def program() -> Prepared:
            text = _read(sizes[0]).decode(errors="surrogatepass")
            stdin = os.memfd_create("stdin")
            os.write(stdin, _read(sizes[1]))
            os.lseek(stdin, 0, os.SEEK_SET)
            return [stdin, self._output, self._nothing], lambda: reply.run(text)

        status = _end(self._fork(program, memory), limit_s)
        if status is None:
            _say(passed=False, why=f"no end within limit_s = {limit_s:g}")
        else:
            _say(passed=not status, why=_why(status) if status else "")

    def _fork(self, prepare: Callable[[], Prepared], memory: int) -> int:
        """Fork a confined child; returns its process id.

        Args:
            prepare: reads the child's input; returns its descriptors 0, 1, …, and the function it runs.

        Raises:
            OSError: it could not be set up.
        """
        reading, failed = os.pipe()
        pid = os.fork()
        if not pid:
            self._child(prepare, memory, failed)
        os.close(failed)
        with os.fdopen(reading, "rb") as pipe:
            why = pipe.read().decode()
        if why:
            raise OSError(why)
        return pid

    def _child(self, prepare: Callable[[], Prepared], memory: int, failed: int) -> NoReturn:
        try:
            descriptors, run = prepare()
            # Move them away from their final numbers first.
            *above, failed = [fcntl.fcntl(one, fcntl.F_DUPFD, FREE) for one in (*descriptors, failed)]
            for number, one in enumerate(above):
                os.dup2(one, number)
            os.closerange(len(above), failed)
            self._confine(memory)
            os.close(failed)
            failed = -1
            run()
        except BaseException as error:
            if failed >= 0:
                os.write(failed, " ".join(f"{error}".split()).encode()[:500])
        finally:
            os._exit(1)

    def _confine(self, memory: int) -> None:
        os.environ.clear()
        # A resumed stage must get the same verdict.
        random.seed(0)
        limits = {
            resource.RLIMIT_AS: self._address_space + memory,
            resource.RLIMIT_FSIZE: OUTPUT_BYTES,
            resource.RLIMIT_CORE: 0,
        }
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, value))
        # The filter below is enough. If allowed, also drop the file system and root's rights.
        is_root = os.geteuid() == 0
        with contextlib.suppress(OSError):
            if not is_root:
                self._libc.unshare(CLONE_NEWUSER)
            os.chroot(".")
        with contextlib.suppress(OSError):
            if is_root:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
        control(PR_SET_PDEATHSIG, signal.SIGKILL, "is not ended with its parent")
        if os.getppid() != self._pid:
            os._exit(1)
        install(self._filter)


def _end(pid: int, limit_s: float) -> int | None:
    """Kill a child after at most `limit_s`; returns its status if it ended by itself, else None."""
    process, poll = os.pidfd_open(pid), select.poll()
    poll.register(process, select.POLLIN)
    # stdin closes when the client is gone; children end with this process.
    poll.register(0, 0)
    ended = [one for one, _ in poll.poll(limit_s * 1000)]
    if 0 in ended:
        os._exit(1)
    os.close(process)
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return status if ended else None


def _why(status: int) -> str:
    used = reply.REFUSED.get(os.waitstatus_to_exitcode(status))
    return f"the code uses {used}, {reply.IS_REFUSED}" if used else f"the code ended with {_ending(status)}"


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _read(size: int) -> bytes:
    """Exactly `size` bytes of stdin."""
    parts: list[bytes] = []
    while size:
        part = os.read(0, min(size, 2**20))
        if not part:
            raise EOFError("stdin has ended")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _say(**answer: Any) -> None:
    os.write(ANSWERS, json.dumps(answer).encode() + b"\n")


def _load() -> None:
    """Load the standard library, since a reply cannot open its files."""
    warnings.simplefilter("ignore")
    for name in [*sorted(sys.stdlib_module_names - set(NOT_LOADED.split())), *LOADED_TOO.split()]:
        with contextlib.suppress(ImportError):  # modules of other systems
            importlib.import_module(name)
    site.setquit()
    sys.path.clear()
    sys.argv[1:] = []
    atexit._clear()
    gc.collect()
    gc.freeze()


def main(output: int) -> None:
    """Answer questions until stdin ends."""
    _load()
    server = _Server(output)
    _say(ready=True)
    while True:
        try:
            kind, first, second, limit_s, memory = HEADER.unpack(_read(HEADER.size))
        except EOFError:
            return
        try:
            (server.tests if kind == TESTS else server.case)((first, second), limit_s, memory)
        except OSError as error:
            # Unread texts would be taken for the next question.
            _say(error=str(error))
            return
