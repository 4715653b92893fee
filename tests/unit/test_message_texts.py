"""Texts of messages are compared whole, with room for what differs from run to run, and belong to a test there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import message_texts
from tests.message_texts import FOLDER, WRITE, Messages, read

TESTS = FOLDER.parent


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Messages:
    """A test that wrote `a: 1 by pid 7` and, second, `b`."""
    monkeypatch.setattr(message_texts, "FOLDER", tmp_path)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    with monkeypatch.context() as writing:
        writing.setenv(WRITE, "1")
        first = Messages(TESTS / "unit" / "test_it.py", "test_it[x]", tmp_path)
        first.check(f"{tmp_path}/a: 1 by pid 7  ")
        first.check("b\n")
    return Messages(TESTS / "unit" / "test_it.py", "test_it[x]", tmp_path)


def test_each_message_is_compared_whole(told: Messages, tmp_path: Path) -> None:
    assert read(tmp_path / "unit.txt") == {
        "test_it.py::test_it[x]": "{tmp}/a: 1 by pid {n}",
        "test_it.py::test_it[x] #2": "b",
    }
    told.check(f"{tmp_path}/a: 1 by pid 8")
    with pytest.raises(AssertionError), told.raises(ValueError):
        raise ValueError("b, and more")
    with pytest.raises(AssertionError):
        told.check("of a third there is nothing on file")


def test_a_mark_stands_for_any_text_in_a_line(told: Messages, tmp_path: Path) -> None:
    file = tmp_path / "unit.txt"
    file.write_text(file.read_text().replace("a: 1", "a: {*}"))
    told.check(f"{tmp_path}/a: 2.5 s by pid 7")
    with told.raises(ValueError):
        raise ValueError("b")


def test_every_text_on_file_belongs_to_a_test() -> None:
    for path in FOLDER.glob("*.txt"):
        folder = TESTS.joinpath(*path.stem.split("-"))
        for key in read(path):
            file, _, name = key.partition("::")
            [function] = re.findall(r"^\w+", name)
            assert f"def {function}(" in (folder / file).read_text(encoding="utf-8"), f"{path.name}: {key}"
