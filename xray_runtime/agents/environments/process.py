"""A `worker` process with non-blocking pipes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from xray_runtime.agents.environments import worker
from xray_runtime.agents.worker_process import start_worker

READ_BYTES = 2**20


class WorkerProcess:
    """The arguments are those of `EnvironmentPool`. Raises OSError if it cannot be started."""

    def __init__(self, environment: str, memory_mb: int, log_path: Path | None) -> None:
        self._process, self._held, theirs = start_worker(worker.__name__, log_path)
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
