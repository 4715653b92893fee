"""Built-in verifiers: mathematics, patterns, JSON, code. They score 1 or 0.

A wrong reply, or one that exceeds a limit, scores 0. A failed score is not the reply's fault: a process cannot be
started, or a column cannot be read.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from xray_runtime.config.rewards import CodeVerifier, JSONSchemaVerifier, MathVerifier, RegexVerifier
from xray_runtime.rewards import checks, worker
from xray_runtime.rewards.code.client import CodeSandbox, read_tests
from xray_runtime.rewards.sandbox import LIMITED, LimitedProcess
from xray_runtime.rewards.source import Batch, Score, described, failure

if TYPE_CHECKING:
    from xray_runtime.config.rewards import Verifier

ATTEMPTS = 3
"""Checks of a reply, until a failure of the system becomes a failed score."""
LIMITS = {
    # Address space; little of it is used.
    "RLIMIT_AS": 2**32,
    "RLIMIT_FSIZE": 2**24,
    "RLIMIT_NOFILE": 64,
    "RLIMIT_NPROC": 0,
    "RLIMIT_CORE": 0,
}
WARM_UP: dict[str, Sequence[Any]] = {"math": ("$1$", "1"), "regex": ("", "", None), "json_schema": ("1", {})}
PROGRAM = f"{LIMITED}\nimport runpy\nrunpy.run_module({worker.__name__!r}, run_name='__main__', alter_sys=True)\n"


class VerifierSource:
    """A verifier, which checks as many replies at the same time as there are processors."""

    relative = False

    def __init__(self, config: Verifier) -> None:
        self._config = config
        self._parallel = len(os.sched_getaffinity(0))
        self._free: SimpleQueue[_TextChecks | _CodeChecks] = SimpleQueue()
        # Processes stay for the next batch, since libraries take a second to load.
        stack = ExitStack()
        for _ in range(self._parallel):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xray-verifier-")))
            one = _CodeChecks(config, directory) if isinstance(config, CodeVerifier) else _TextChecks(config, directory)
            stack.callback(one.close)
            self._free.put(one)
        weakref.finalize(self, stack.close)

    def score(self, batch: Batch) -> list[Score]:
        column = self._config.column

        def checked(row: tuple[str, Any]) -> Score:
            if column is not None and row[1] is None:
                return failure(f"column {column!r} has no value in a row")
            one = self._free.get()
            try:
                for _ in range(ATTEMPTS):
                    try:
                        return one.check(*row)
                    except (OSError, RuntimeError) as error:
                        last = error
                return failure(described(last))
            finally:
                self._free.put(one)

        with ThreadPoolExecutor(self._parallel) as pool:
            return list(pool.map(checked, zip(batch.answers, batch.column(column), strict=True)))


class _TextChecks:
    """Checks of `worker` in a process, which is killed if a check takes too long."""

    def __init__(self, config: MathVerifier | RegexVerifier | JSONSchemaVerifier, directory: Path) -> None:
        self._config = config
        warm_up = _line(config.kind, WARM_UP[config.kind])
        self._process = LimitedProcess(directory, PROGRAM, LIMITS, sys.path, warm_up)
        self.close = self._process.end

    def check(self, reply: str, given: Any) -> Score:
        config = self._config
        arguments: Sequence[Any]
        if isinstance(config, MathVerifier):
            arguments = (reply, given)
        elif isinstance(config, RegexVerifier):
            arguments = (reply, config.pattern, given)
        else:
            arguments = (reply, config.definition if config.column is None else given)
        answer = self._process.ask(_line(config.kind, arguments), config.limit_s)
        return Score(0.0 if answer is None else float(answer["score"]))


class _CodeChecks:
    """Runs code of replies against a column's tests."""

    def __init__(self, config: CodeVerifier, directory: Path) -> None:
        self._config = config
        self._sandbox = CodeSandbox(directory)
        self.close = self._sandbox.close

    def check(self, reply: str, given: Any) -> Score:
        config = self._config
        try:
            tests = read_tests(given)
        except ValueError as error:
            return failure(f"column {config.column!r} {error}")
        return self._sandbox.score(checks.last_block(reply), tests, config.limit_s, config.memory_mb)


def _line(name: str, arguments: Sequence[Any]) -> bytes:
    return json.dumps([name, arguments]).encode() + b"\n"
