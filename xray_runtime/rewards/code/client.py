"""Scores code of replies with a `server`: by tests, or by the output of programs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from xray_runtime.rewards.code import server
from xray_runtime.rewards.sandbox import LIMITED, OURS, START_S, LimitedProcess
from xray_runtime.rewards.source import Score, failure

ALLOWED = 'must hold Python statements, a list of them, or {"inputs": [...], "outputs": [...]}, as many texts in each'


def read_tests(value: Any) -> str | list[tuple[str, str]]:
    """The tests in a column: Python statements that raise if the code is wrong, or a program's inputs and outputs.

    Raises:
        ValueError: `value` is neither.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return str(value)
    if isinstance(value, dict):
        inputs, outputs = value.get("inputs"), value.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or not 0 < len(inputs) == len(outputs):
            raise ValueError(ALLOWED)
        if not all(isinstance(text, str) for text in (*inputs, *outputs)):
            raise ValueError(ALLOWED)
        return list(zip(inputs, outputs, strict=True))
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str) for line in lines):
        raise ValueError(ALLOWED)
    return "\n".join(lines)


class CodeSandbox:
    """A `server`, and a file for the output of programs."""

    def __init__(self, directory: Path) -> None:
        self._output = os.memfd_create("xray-output")
        root = str(OURS.parent)
        program = f"{LIMITED}\nsys.path.insert(0, {root!r})\nfrom {server.__name__} import main\nmain({self._output})\n"
        warm_up = _question(server.TESTS, "def f(): pass", "f()", START_S, 2**30)
        limits, fds = {"RLIMIT_CORE": 0}, [self._output]
        self._process = LimitedProcess(directory, program, limits, None, warm_up, fds, filters_itself=True)

    def score(self, code: str, tests: str | list[tuple[str, str]], limit_s: float, memory_mb: int) -> Score:
        """1 if the code passes all tests, else 0 and the reason; a failed score if the tests are not usable.

        Raises:
            RuntimeError: the sandbox does not work.
            OSError: the sandbox cannot be started.
        """
        memory = memory_mb * 2**20
        if isinstance(tests, str):
            answer = self._ask(_question(server.TESTS, code, tests, limit_s, memory), limit_s)
            if "unusable" in answer:
                return failure(answer["unusable"])
            return Score(float(answer["passed"]), answer.get("why"))
        for number, (stdin, stdout) in enumerate(tests):
            answer = self._ask(_question(server.CASE, code, stdin, limit_s, memory), limit_s)
            if not answer["passed"]:
                return Score(0.0, f"case {number}: {answer['why']}")
            output = os.pread(self._output, server.OUTPUT_BYTES, 0).decode(errors="replace")
            if _printed(output) != _printed(stdout):
                return Score(0.0, f"case {number}: it prints different output")
        return Score(1.0)

    def close(self) -> None:
        """Stop the server."""
        self._process.end()
        os.close(self._output)

    def _ask(self, question: bytes, limit_s: float) -> dict[str, Any]:
        # The server enforces the limit itself, and ends after an error.
        try:
            answer = self._process.ask(question, limit_s + START_S)
        except RuntimeError:
            self._process.end()
            raise
        if answer is None:
            raise RuntimeError(f"the sandbox does not answer within {limit_s + START_S:g} s")
        return answer


def _printed(text: str) -> list[str]:
    """The lines without trailing white space."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _question(kind: int, code: str, other: str, limit_s: float, memory: int) -> bytes:
    first, second = (text.encode(errors="surrogatepass") for text in (code, other))
    return server.HEADER.pack(kind, len(first), len(second), limit_s, memory) + first + second
