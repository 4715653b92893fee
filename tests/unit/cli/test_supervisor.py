"""When the supervisor starts a run again, and when its exit code is the run's own."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from xray.cli import supervisor
from xray.cli.supervisor import ENDED, FAILED, INTERRUPTED, supervise

Attempt = Callable[[Path], int]
"""(directory of the job) → exit code of its process."""


def by_itself(code: int) -> Attempt:
    def end(place: Path) -> int:
        (place / ENDED).touch()
        return code

    return end


def supervised(attempts: list[Attempt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, str]:
    """(exit code, attempts made, what was printed), with one restart allowed."""
    made = 0

    def run_once(heartbeat: Path, *_: Any) -> int:
        nonlocal made
        made += 1
        return attempts[made - 1](heartbeat.parent)

    monkeypatch.setattr(supervisor, "_run_once", run_once)
    monkeypatch.setattr(supervisor, "start_reaper", lambda: "tag")
    monkeypatch.setattr(supervisor, "kill_tagged", lambda tag: None)
    said = io.StringIO()
    code = supervise(tmp_path, restarts=1, stall_timeout_s=60.0, console=Console(file=said), config={})
    return code, made, said.getvalue()


def test_a_failure_of_its_own_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervised([by_itself(FAILED)], tmp_path, monkeypatch)[:2] == (FAILED, 1)


def test_a_process_that_ends_without_a_word_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, made, said = supervised([lambda _: FAILED, by_itself(0)], tmp_path, monkeypatch)
    assert (code, made) == (0, 2)
    assert "starting again (1 of 1)" in said


def test_an_interrupted_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervised([lambda _: INTERRUPTED], tmp_path, monkeypatch)[:2] == (INTERRUPTED, 1)
