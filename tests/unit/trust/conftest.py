"""One synthetic lifecycle with MLflow and one without, whose audit is ten times as fast; copied for every case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.trust.log_attacks import register
from tests.unit.trust.synthetic import Lifecycle, copied
from xray_runtime.kernel.evidence import lines, log
from xray_runtime.kernel.evidence.lines import parse_line
from xray_runtime.kernel.evidence.view import Line


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("untouched") / "run"
    Lifecycle(output).whole()
    return output


@pytest.fixture(scope="session")
def untracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Lifecycle(tmp_path_factory.mktemp("untracked") / "run", tracking=False).whole().output


@pytest.fixture
def bare(untracked: Path, tmp_path: Path) -> Path:
    """A copy of the lifecycle without MLflow."""
    return copied(untracked, tmp_path / "bare")


@pytest.fixture
def fresh(untouched: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of the untouched output under a name of one's own."""

    return lambda name="run": copied(untouched, tmp_path / name)


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """A directory with nothing but a log of three entries."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    register(tmp_path / "run", "one", "two", "three")
    return tmp_path / "run"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of every line that is parsed."""
    seen: list[int] = []

    def counting(number: int, text: bytes, record: type) -> Line:
        seen.append(number)
        return parse_line(number, text, record)

    monkeypatch.setattr(log, "parse_line", counting)
    monkeypatch.setattr(lines, "parse_line", counting)
    return seen
