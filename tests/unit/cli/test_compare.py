"""`xray compare` at a terminal: keys that were pressed before a question was shown are no verdicts."""

from __future__ import annotations

import os
import pty
import select
import sys
import tty
from collections.abc import Iterator

import pytest

from xray.cli import compare


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """What a person types goes in here; the other end is stdin."""
    master, slave = pty.openpty()
    tty.setcbreak(slave)
    with os.fdopen(slave, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield master
    os.close(master)


def waiting() -> bool:
    return bool(select.select([sys.stdin], [], [], 0.5)[0])


def test_keys_pressed_too_early_are_dropped(keyboard: int) -> None:
    os.write(keyboard, b"112q")
    assert waiting()
    compare._discard_typed()
    assert not waiting()
    os.write(keyboard, b"2")
    assert waiting()
    assert compare._key() == "2"


def test_a_pipe_keeps_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.write(write, b"1\n2\n")
    os.close(write)
    with os.fdopen(read, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        compare._discard_typed()
        assert [compare._key(), compare._key()] == ["1", "2"]
