"""Replies that try to pass without being right, or to reach what is not theirs. Each passes only if it succeeds."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from xray_runtime.rewards.source import Score

WRONG = "assert f(1) == 2"
TRUE = "assert f() is True"

ESCAPES = yaml.safe_load(Path(__file__).with_name("escapes.yaml").read_text(encoding="utf-8"))
VERDICT: dict[str, str] = ESCAPES["verdicts"]
"""Against `WRONG`."""

REACHES: dict[str, str] = ESCAPES["reaches"]
"""Each is True where it succeeds."""

LOOKS: dict[str, str] = ESCAPES["looks"]
"""Each is the expected value where it finds the tests in its memory."""
PATTERN = "PATTERN = 'need[l]e-[0-9]+'\n"
"""It does not find itself."""

Judge = Callable[..., Score]


@pytest.mark.parametrize("name", VERDICT)
def test_a_reply_that_is_wrong_does_not_pass(name: str, judge: Judge) -> None:
    found = judge(VERDICT[name], WRONG, limit_s=1.0)
    assert (found.value, bool(found.why)) == (0.0, True)


@pytest.mark.parametrize("name", REACHES)
def test_a_reply_reaches_nothing(name: str, judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "signing.pem"
    key.write_text("PRIVATE")
    # Everybody may read it: the sandbox alone keeps it.
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = (
            REACHES[name]
            .replace("{library}", os.__file__)
            .replace("{key}", str(key))
            .replace("{directory}", str(tmp_path))
            .replace("{parent}", str(os.getpid()))
            .replace("{port}", str(server.getsockname()[1]))
        )
        found = judge(code, TRUE, limit_s=5.0)
    assert (found.value, bool(found.why)) == (0.0, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="others may be kept from a root directory of their own")
def test_names_of_files_are_hidden(judge: Judge) -> None:
    code = """
import ctypes
def f(path):
    return ctypes.CDLL(None).syscall({number}, -100, path.encode(), ctypes.create_string_buffer(4096), 0x1000) == 0
""".replace("{number}", {"x86_64": "262"}.get(platform.machine(), "79"))
    assert judge(code, ["assert f('/')", f"assert not f({__file__!r})", "assert not f('/etc/shadow')"]).value == 1.0


@pytest.mark.parametrize("name", LOOKS)
def test_a_reply_finds_neither_tests_nor_expected_values(name: str, judge: Judge) -> None:
    tests = "assert f() == 'needle-4711'"
    # Tests of the row before, which are the same in a group of replies, are not left behind either.
    assert judge("def f(): return 'needle-4711'", tests).value == 1.0
    found = judge(PATTERN + LOOKS[name], tests)
    assert (found.value, bool(found.why)) == (0.0, True)
