"""A `worker` process and the ends of its pipes, which never block."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import xray_runtime
from xray_runtime.environments import worker

READ_BYTES = 2**20


class WorkerProcess:
    """The leader of a session of its own, so that what it forks can be ended with it.

    Args:
        environment: "module:name".
        memory_mb: its address space.
        log_path: where what it prints is appended; None: nowhere.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, environment: str, memory_mb: int, log_path: Path | None) -> None:
        root = str(Path(xray_runtime.__file__).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        # Each arena of the C library takes 64 MB of address space, and there are eight a core.
        variables = os.environ | {"PYTHONPATH": path, "MALLOC_ARENA_MAX": "2"}
        theirs, self._held = os.pipe()
        try:
            with open(os.devnull if log_path is None else log_path, "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", worker.__name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=variables,
                    start_new_session=True,
                    pass_fds=[theirs],
                )
        except OSError:
            os.close(self._held)
            raise
        finally:
            os.close(theirs)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.stdin, self.stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        self.exited = os.pidfd_open(self._process.pid)
        """Readable when the process has ended."""
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.stdout, False)
        self._read, self._unsent = bytearray(), bytearray()
        self.write({"environment": environment, "path": sys.path, "memory_mb": memory_mb, "parent": theirs})

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` is to be called when `stdin` is writable."""
        return bool(self._unsent)

    def write(self, message: dict[str, Any]) -> None:
        """Send a message, now or with later calls of `flush`."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what the pipe takes."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self.stdin, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # it has ended, which `exited` says

    def read(self) -> list[dict[str, Any]]:
        """The messages that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.stdout, READ_BYTES):
                self._read += part
        *lines, rest = bytes(self._read).split(b"\n")
        self._read = bytearray(rest)
        messages = []
        for line in lines:
            # An environment that finds the pipe may write what it likes.
            with contextlib.suppress(ValueError):
                messages.append(json.loads(line))
        return [message for message in messages if isinstance(message, dict)]

    def end(self) -> int:
        """End it and its group; returns its exit code, negative: the signal."""
        # Not reaped yet: the number of the group is still its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        os.close(self.exited)
        os.close(self._held)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        return code
