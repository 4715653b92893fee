"""Processes that run code of users: what the parent and its children have in common."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import xray_runtime
from xray_runtime.rewards.source import described

ERROR_CHARS = 500


def start_worker(module: str, log_path: Path | None) -> tuple[subprocess.Popen[bytes], int, int]:
    """(process, our end of a pipe, the process's end) of a worker in its own session, so that its forked children can
    be killed with it. It ends when our end closes (`end_with`).

    Args:
        log_path: file for its standard error; None: discard it.

    Raises:
        OSError: it cannot be started.
    """
    root = str(Path(xray_runtime.__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    theirs, ours = os.pipe()
    try:
        with open(os.devnull if log_path is None else log_path, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # The C library would make eight arenas a core, with 64 MB of address space each.
                env=os.environ | {"PYTHONPATH": path, "MALLOC_ARENA_MAX": "2"},
                start_new_session=True,
                pass_fds=[theirs],
            )
    except OSError:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return process, ours, theirs


def take_streams() -> tuple[int, int]:
    """(output for answers, input of requests) of this process; what code of users prints goes to standard error, and
    it reads nothing."""
    answers, requests = os.dup(1), os.dup(0)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return answers, requests


def end_with(pipe: int) -> None:
    """Have the kernel kill this process and its group when the other end of `pipe` closes.

    A thread could not do so while user code holds the interpreter, as a regular expression may.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def in_short(error: BaseException) -> str:
    """An error in one line of at most `ERROR_CHARS`."""
    line = " ".join(described(error).split())[:ERROR_CHARS]
    # The ledger stores it as UTF-8.
    return line.encode(errors="backslashreplace").decode()
