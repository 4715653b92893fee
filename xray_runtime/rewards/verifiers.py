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
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from xray_runtime.data.pairs import HELDOUT, TRAIN, VALIDATION, Example, Pairs
from xray_runtime.kernel.errors import shown
from xray_runtime.rewards import checks, worker
from xray_runtime.rewards.code.client import CodeSandbox, read_tests
from xray_runtime.rewards.sandbox import LIMITED, LimitedProcess
from xray_runtime.rewards.source import Batch, Score, Source, described, failure
from xray_runtime.rewards.verifier_config import CodeVerifier

if TYPE_CHECKING:
    from xray_runtime.rewards.term import SourceRoute
    from xray_runtime.rewards.verifier_config import TextVerifier, Verifier

T = TypeVar("T")
R = TypeVar("R")

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
PROGRAM = f"{LIMITED}\nimport runpy\nrunpy.run_module({worker.__name__!r}, run_name='__main__', alter_sys=True)\n"


class VerifierSource(Source):
    """A verifier, which checks as many replies at the same time as there are processors.

    Args:
        where: its field in errors.
        when: the rows whose replies are scored.
    """

    def __init__(self, config: Verifier, where: str, when: SourceRoute | None = None) -> None:
        self._config, self._where, self._when = config, where, when
        self.runs_code = isinstance(config, CodeVerifier)
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

        def checked(one: _TextChecks | _CodeChecks, row: tuple[str, Any]) -> Score:
            if column is not None and row[1] is None:
                return failure(f"column {column!r} has no value in a row")
            return one.check(*row)

        scores = self._each(checked, list(zip(batch.answers, batch.column(column), strict=True)))
        return [score if isinstance(score, Score) else failure(described(score)) for score in scores]

    def check(self, dataset: Path, columns: Collection[str]) -> None:
        """As `Source.check`, each value once. Raises RuntimeError too: the verifier's process does not work."""
        column, known = self._config.column, {"null"}
        if column is None:
            return
        for side in (dataset / name for name in (TRAIN, VALIDATION, HELDOUT) if (dataset / name).exists()):
            for batch in Pairs(side, Example).batches():
                fresh: dict[str, str] = {}
                for example in batch:
                    values = json.loads(example.columns)
                    text = json.dumps(values.get(column))
                    if text not in known and self._reads(values):
                        fresh.setdefault(text, example.id)
                known |= fresh.keys()
                refusals = self._each(lambda one, text: one.refusal(json.loads(text)), list(fresh))
                for (text, row), why in zip(fresh.items(), refusals, strict=True):
                    if isinstance(why, Exception):
                        raise RuntimeError(f"{self._where}: {described(why)}")
                    if why is not None:
                        where = f"row {row} of {side.name}, column {column!r}"
                        raise ValueError(f"{self._where}: {where}: {shown(json.loads(text))} is not allowed: {why}")

    def _reads(self, columns: Mapping[str, Any]) -> bool:
        return self._when is None or self._when.applies(columns.get(self._when.column))

    def _each(self, check: Callable[[_TextChecks | _CodeChecks, T], R], given: Sequence[T]) -> list[R | Exception]:
        """The result of each check, or the error that remains after `ATTEMPTS`."""

        def tried(one: T) -> R | Exception:
            process = self._free.get()
            try:
                for _ in range(ATTEMPTS):
                    try:
                        return check(process, one)
                    except (OSError, RuntimeError) as error:
                        last = error
                return last
            finally:
                self._free.put(process)

        with ThreadPoolExecutor(self._parallel) as pool:
            return list(pool.map(tried, given))


class _TextChecks:
    """Checks of `worker` in a process, which is killed if a check takes too long."""

    def __init__(self, config: TextVerifier, directory: Path) -> None:
        self._config = config
        warm_up = _line(config.kind, config.warm_up)
        self._process = LimitedProcess(directory, PROGRAM, LIMITS, sys.path, warm_up)
        self.close = self._process.end

    def check(self, reply: str, given: Any) -> Score:
        arguments = self._config.arguments(reply, given)
        answer = self._process.ask(_line(self._config.kind, arguments), self._config.limit_s)
        return Score(0.0 if answer is None else float(answer["score"]))

    def refusal(self, given: Any) -> str | None:
        """Why the column's value cannot be used."""
        answer = self._process.ask(_line(f"{self._config.kind}_gold", (given,)), self._config.limit_s)
        return f"it takes longer than limit_s = {self._config.limit_s:g}" if answer is None else answer["refused"]


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
        return self._sandbox.score(checks.last_block(reply, *checks.PYTHON), tests, config.limit_s, config.memory_mb)

    def refusal(self, given: Any) -> str | None:
        """Why the column's value cannot be used."""
        try:
            read_tests(given)
        except ValueError as error:
            return str(error)
        return None


def _line(name: str, arguments: Sequence[Any]) -> bytes:
    return json.dumps([name, arguments]).encode() + b"\n"
