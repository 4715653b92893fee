"""`xray compare` at a terminal: keys that were pressed before a question was shown are no verdicts."""

from __future__ import annotations

import os
import pty
import sys
import threading
from collections.abc import Iterator

import pytest

from xray.cli.commands import compare


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """What a person types goes in here; the other end is stdin."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield master
    os.close(master)


def test_keys_pressed_before_a_question_are_no_verdicts(keyboard: int) -> None:
    os.write(keyboard, b"112q")
    later = threading.Timer(1.0, os.write, (keyboard, b"2"))
    later.start()
    assert compare._key() == "2"
    later.join()


def test_a_pipe_keeps_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.write(write, b"1\n2\n")
    os.close(write)
    with os.fdopen(read, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert [compare._key(), compare._key()] == ["1", "2"]
