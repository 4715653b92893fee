"""Built-in verifiers: mathematics, patterns, JSON, code. They score 1 or 0.

A wrong reply, and one that takes more than it may, scores 0. What fails is what is not the reply's fault: a process
that cannot be started, a column that cannot be read.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from xray_runtime.config.rewards import CodeVerifier, MathVerifier, RegexVerifier
from xray_runtime.rewards import checks, worker
from xray_runtime.rewards.sandbox import LIMITED, START_S, limits_of, passes, sandboxed
from xray_runtime.rewards.source import Batch, Score, described, failure

if TYPE_CHECKING:
    from xray_runtime.config.rewards import Verifier

ATTEMPTS = 3
WORKER_MB = 4096
"""Address space, of which little is used."""
WARM_UP: dict[str, Sequence[Any]] = {"math": ("$1$", "1"), "regex": ("", "", None), "json_schema": ("1", {})}
PROGRAM = f"{LIMITED}\nimport runpy\nrunpy.run_module({worker.__name__!r}, run_name='__main__', alter_sys=True)\n"


class VerifierSource:
    """A verifier; it checks as many replies at the same time as there are processors."""

    relative = False

    def __init__(self, config: Verifier) -> None:
        self._config = config
        self._parallel = len(os.sched_getaffinity(0))
        self._workers: SimpleQueue[_Worker] = SimpleQueue()
        # They stay for the next batch: libraries take a second to load.
        stack = ExitStack()
        for _ in range(0 if isinstance(config, CodeVerifier) else self._parallel):
            self._workers.put(stack.enter_context(_worker()))
        weakref.finalize(self, stack.close)

    def score(self, batch: Batch) -> list[Score]:
        column = self._config.column

        def checked(row: tuple[str, Any]) -> Score:
            if column is not None and row[1] is None:
                return failure(f"column {column!r} has no value in a row")
            return again(lambda: self._check(*row))

        with ThreadPoolExecutor(self._parallel) as pool:
            return list(pool.map(checked, zip(batch.replies, batch.column(column), strict=True)))

    def _check(self, reply: str, given: Any) -> float:
        config = self._config
        if isinstance(config, CodeVerifier):
            tests = "\n".join(map(str, given)) if isinstance(given, list) else str(given)
            return float(passes(checks.last_block(reply), tests, config.limit_s, config.memory_mb))
        free = self._workers.get()
        try:
            return free.ask(*self._question(reply, given), limit_s=config.limit_s)
        finally:
            self._workers.put(free)

    def _question(self, reply: str, given: Any) -> tuple[str, Sequence[Any]]:
        config = self._config
        if isinstance(config, MathVerifier):
            return "math", (reply, given)
        if isinstance(config, RegexVerifier):
            return "regex", (reply, config.pattern, given)
        assert not isinstance(config, CodeVerifier)
        return "json_schema", (reply, config.definition if config.column is None else given)


def again(check: Callable[[], float]) -> Score:
    """The score of a check; where the system fails it, after `ATTEMPTS`, why."""
    for _ in range(ATTEMPTS):
        try:
            return Score(check())
        except (OSError, RuntimeError) as error:
            last = error
    return failure(described(last))


class _Worker:
    """A `worker` process, started when it is needed and again after it was ended."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, name: str, arguments: Sequence[Any], limit_s: float) -> float:
        """The answer, 0 where it takes too long.

        Raises:
            RuntimeError: the process does not start, ends by itself, or cannot read what the column holds.
        """
        if self._process is None:
            self._start(name)
        return self._exchange(name, arguments, limit_s)

    def _start(self, name: str) -> None:
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started = sandboxed(PROGRAM, limits_of(WORKER_MB), self._directory, sys.path, **streams)
        self._process = self._stack.enter_context(started)
        if self._answer(START_S) != worker.READY:
            self.end()
            raise RuntimeError("the verifier's process did not start")
        # What a check loads is not to count against its first reply.
        self._exchange(name, WARM_UP[name], START_S)
        if self._process is None:
            raise RuntimeError(f"the verifier's process was not ready within {START_S:g} s")

    def _exchange(self, name: str, arguments: Sequence[Any], limit_s: float) -> float:
        assert self._process is not None
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps([name, arguments]).encode() + b"\n")
            stdin.flush()
        except OSError:
            self.end()
            raise
        answer = self._answer(limit_s)
        if answer is None:
            ended = self._process.poll()
            self.end()
            if ended is None:
                return 0.0
            raise RuntimeError(f"the verifier's process ended unexpectedly ({ended})")
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return float(answer["score"])

    def _answer(self, limit_s: float) -> Any:
        """The next line; None where it does not come."""
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
        return json.loads(line)

    def end(self) -> None:
        """End the process; the next question starts another."""
        self._stack.close()
        self._process = None


@contextmanager
def _worker() -> Iterator[_Worker]:
    with tempfile.TemporaryDirectory(prefix="xray-verifier-") as directory:
        one = _Worker(Path(directory))
        try:
            yield one
        finally:
            one.end()
