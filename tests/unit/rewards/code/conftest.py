"""One sandbox for all tests of code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from xray_runtime.rewards.code.client import CodeSandbox, read_tests
from xray_runtime.rewards.source import Score

Judge = Callable[..., Score]


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CodeSandbox]:
    one = CodeSandbox(Path(tmp_path_factory.mktemp("sandbox")))
    yield one
    one.close()


@pytest.fixture
def judge(sandbox: CodeSandbox) -> Judge:
    """What the sandbox says of code and what a column holds."""

    def judge(code: str, given: Any, limit_s: float = 10.0, memory_mb: int = 256) -> Score:
        return sandbox.score(code, read_tests(given), limit_s, memory_mb)

    return judge
