"""Processes with limits, which answer one question at a time and can be killed meanwhile.

Each has its own session and an empty temporary directory, almost no environment, and none of our files open. With
bubblewrap it has a file system, processes and a network of its own, too. Its group is killed at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import xray_runtime
from xray_runtime.kernel.confine.confine import View, confined, confinement
from xray_runtime.kernel.processes import TAG

START_S = 60.0
OURS = Path(xray_runtime.__file__).parent
READY = {"ready": True}
"""The first line of a started process."""

LIMITED = """
import json, resource, sys
limits, path = json.loads(sys.argv.pop())
for name, value in limits.items():
    resource.setrlimit(getattr(resource, name), (value, value))
sys.path[:] = path or sys.path
"""
"""Beginning of every program."""


class LimitedProcess:
    """A process that answers questions, started on demand and again after it ended.

    Args:
        directory: its working directory.
        program: its source, which begins with `LIMITED`.
        limits: name of a limit of `resource` → value.
        path: its module path; None: the standard library only.
        warm_up: a first question, so that imports do not count against the limit of a real one.
        filters_itself: it limits the system calls of the programs that it starts, which an agent's filter would refuse.
    """

    def __init__(
        self,
        directory: Path,
        program: str,
        limits: dict[str, int],
        path: list[str] | None,
        warm_up: bytes,
        pass_fds: Sequence[int] = (),
        *,
        filters_itself: bool = False,
    ) -> None:
        self._directory, self._program, self._limits, self._path = directory, program, limits, path
        self._warm_up, self._pass_fds, self._filters_itself = warm_up, pass_fds, filters_itself
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: bytes, limit_s: float) -> dict[str, Any] | None:
        """The answer; None if it takes too long, after which the process is killed.

        Raises:
            RuntimeError: the process does not start, ends by itself, or answers with an error.
            OSError: it cannot be started.
        """
        if self._process is None:
            self._start()
        return self._exchange(question, limit_s)

    def end(self) -> None:
        """Kill the process; the next question starts another."""
        self._stack.close()
        self._process = None

    def _start(self) -> None:
        # The run's tag, so that it does not outlive a killed run, and a seed for the order of sets.
        environment = {name: os.environ[name] for name in (TAG,) if name in os.environ}
        environment |= {"PYTHONHASHSEED": "0", "TZ": "UTC0"}
        options = ["-B", "-s", "-P", *(["-S"] if self._path is None else [])]
        command = [sys.executable, *options, "-c", self._program, json.dumps([self._limits, self._path])]
        if confinement() == "bubblewrap":
            readable = [OURS, *map(Path, filter(os.path.isabs, self._path or []))]
            # The thread that starts it may end before.
            view = View(self._directory, readable, with_parent=False, filters_itself=self._filters_itself)
            command = confined(command, view, "bubblewrap")
        self._errors = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            cwd=self._directory,
            env=environment,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=self._pass_fds,
        )
        self._stack.callback(_kill, self._process)
        if self._answer(START_S) != READY:
            why = self._ending() or f"it is not ready within {START_S:g} s"
            self.end()
            raise RuntimeError(f"the verifier's process did not start: {why}")
        try:
            is_warm = self._exchange(self._warm_up, START_S) is not None
        except RuntimeError:
            self.end()
            raise
        if not is_warm:
            raise RuntimeError(f"the verifier's process was not ready within {START_S:g} s")

    def _exchange(self, question: bytes, limit_s: float) -> dict[str, Any] | None:
        assert self._process is not None
        stdin = self._process.stdin
        assert stdin is not None
        # A process that ends before it has read everything may still have answered.
        with contextlib.suppress(OSError):
            stdin.write(question)
            stdin.flush()
        answer = self._answer(limit_s)
        if answer is None:
            ending = self._ending()
            self.end()
            if ending is None:
                return None
            raise RuntimeError(f"the verifier's process ended unexpectedly: {ending}")
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def _ending(self) -> str | None:
        """Exit code and last line of stderr; None if the process is still running."""
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return None
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").split("\n") if line.strip()]
        return ": ".join([f"exit code {code}", *lines[-1:]])

    def _answer(self, limit_s: float) -> dict[str, Any] | None:
        """The next line; None if there is none in time."""
        assert self._process is not None
        assert self._process.stdout is not None
        line, end, out = b"", time.monotonic() + limit_s, self._process.stdout.fileno()
        ready = select.poll()
        ready.register(out, select.POLLIN)
        while not line.endswith(b"\n"):
            if not ready.poll(max(end - time.monotonic(), 0.0) * 1000):
                return None
            part = os.read(out, 65536)
            if not part:
                self._process.wait()
                return None
            line += part
        answer: dict[str, Any] = json.loads(line)
        return answer


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(OSError):
            stream.close()
