"""A `worker` process with non-blocking pipes."""

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
from xray_runtime.agents.environments import worker

READ_BYTES = 2**20


class WorkerProcess:
    """A worker in its own session, so that its forked children can be killed with it; the arguments are those of
    `EnvironmentPool`. Raises OSError if it cannot be started."""

    def __init__(self, environment: str, memory_mb: int, log_path: Path | None) -> None:
        root = str(Path(xray_runtime.__file__).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        # The C library would make eight arenas a core, with 64 MB of address space each.
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
        """File descriptor that is readable when the process has ended."""
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.stdout, False)
        self._read, self.unsent = bytearray(), bytearray()
        """`unsent`: what `flush` must still send when `stdin` is writable."""
        self.write({"environment": environment, "path": sys.path, "memory_mb": memory_mb, "parent": theirs})

    def write(self, message: dict[str, Any]) -> None:
        """Send a message, now or in later calls of `flush`."""
        self.unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send as much as the pipe accepts."""
        try:
            while self.unsent:
                del self.unsent[: os.write(self.stdin, self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()  # it has ended, see `exited`

    def read(self) -> list[dict[str, Any]]:
        """The messages that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.stdout, READ_BYTES):
                self._read += part
        *lines, rest = bytes(self._read).split(b"\n")
        self._read = bytearray(rest)
        messages = []
        for line in lines:
            # An environment could write anything to the pipe.
            with contextlib.suppress(ValueError):
                messages.append(json.loads(line))
        return [message for message in messages if isinstance(message, dict)]

    def end(self) -> int:
        """Kill it with its group; returns its exit code, negative for a signal."""
        # Before it is reaped, so that the system cannot have reused the group's number.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        os.close(self.exited)
        os.close(self._held)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        return code
