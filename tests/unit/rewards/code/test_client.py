"""Tests of code as people have them, and what becomes of code and tests that are wrong."""

# ruff: noqa: E501

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from xray_runtime.kernel.confine.confine import confinement
from xray_runtime.rewards import sandbox as processes
from xray_runtime.rewards.code.client import CodeSandbox, read_tests
from xray_runtime.rewards.source import Score

Judge = Callable[..., Score]
REPLIES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("replies.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", REPLIES["right"], ids=itemgetter("code"))
def test_code_that_is_right_passes_and_other_code_does_not(case: dict[str, Any], judge: Judge) -> None:
    code, tests = case["code"], case["tests"]
    found = judge(code, tests)
    assert found.value == 1.0, found.why
    if "return" in code:
        assert judge(code.replace("return", "return 7 if True else"), tests).value == 0.0


@pytest.mark.parametrize("case", REPLIES["wrong"], ids=itemgetter("code"))
def test_a_wrong_reply_gets_its_reason(case: dict[str, str], judge: Judge) -> None:
    assert judge(case["code"], "assert f(1) == 2") == Score(0.0, case["why"])


@pytest.mark.parametrize("case", REPLIES["wrong_tests"], ids=itemgetter("tests"))
def test_tests_that_are_wrong_are_no_fault_of_the_reply(case: dict[str, str], judge: Judge) -> None:
    found = judge("def f(x): return 2\ncandidate = 1\ndef check(*a): pass", case["tests"])
    assert math.isnan(found.value)
    assert str(found.why).startswith(case["why"])


def test_programs_read_and_print(judge: Judge) -> None:
    cases = {"inputs": ["3\n1 2 3\n", "1\n5\n"], "outputs": ["6\n", "5"]}
    for code in REPLIES["programs"]:
        assert judge(code, cases) == Score(1.0), code
    for case in REPLIES["wrong_programs"]:
        assert judge(case["code"], cases, limit_s=2.0) == Score(0.0, case["why"]), case["code"]


def test_one_program_leaves_nothing_to_the_next(judge: Judge) -> None:
    look = "print(open(0).read() or 'nothing', end='')"
    assert judge("print('x' * 1000)", {"inputs": [""], "outputs": ["x" * 1000]}).value == 1.0
    assert judge(look, {"inputs": ["", "secret", ""], "outputs": ["nothing", "secret", "nothing"]}).value == 1.0


def test_values_a_column_of_tests_may_hold() -> None:
    assert read_tests(["a = 1", "assert f(a)"]) == "a = 1\nassert f(a)"
    assert read_tests("{1: 2}") == "{1: 2}"
    assert read_tests('{"inputs": ["1"], "outputs": ["2"]}') == read_tests({"inputs": ["1"], "outputs": ["2"]})
    for wrong in (3, [3], {"inputs": ["1"]}, {"inputs": [1], "outputs": ["2"]}, {"inputs": [], "outputs": []}, {}):
        with pytest.raises(ValueError, match="must hold Python statements"):
            read_tests(wrong)


def test_the_cause_is_told_where_no_sandbox_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = CodeSandbox(tmp_path)
    monkeypatch.setattr(processes.sys, "executable", "/no/such/python")
    with pytest.raises((OSError, RuntimeError), match="No such file"):
        one.score("", "", 1.0, 64)
    monkeypatch.undo()
    for fault, why in {
        "server.computing_filter = lambda: b''": "a process takes no seccomp filter here: Invalid argument",
        "server.computing_filter = lambda: computing_filter('sparc')": "the sandbox knows no system calls of sparc: it runs on x86_64 and aarch64",
        "server.os.fork = lambda: open('/no/such')": "No such file or directory",
        "server.Channel = 1 / 0": "exit code 1: ZeroDivisionError: division by zero",
    }.items():  # fmt: skip
        source = one._process._program.replace(
            "import main\nmain(",
            f"import main\nfrom xray_runtime.rewards.code import server\n"
            f"from xray_runtime.kernel.confine.seccomp import computing_filter\n{fault}\nmain(",
        )
        monkeypatch.setattr(one._process, "_program", source)
        with pytest.raises(RuntimeError, match=why):
            one.score("def f(): pass", "f()", 1.0, 64)
        monkeypatch.undo()
    assert one.score("def f(): pass", "f()", 5.0, 64).value == 1.0
    one.close()


def test_a_server_that_is_killed_is_started_again(tmp_path: Path) -> None:
    one = CodeSandbox(tmp_path)
    assert one.score("def f(): pass", "f()", 5.0, 64).value == 1.0
    process = one._process._process
    assert process is not None
    # Bubblewrap's two processes stand above it and tell its end; its own children stand below.
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    next(found for found in tree if found.name() != "bwrap").kill()
    process.wait(30)
    with pytest.raises(RuntimeError, match=r"ended unexpectedly: exit code (-9|137)"):
        one.score("def f(): pass", "f()", 5.0, 64)
    assert one.score("def f(): pass", "f()", 5.0, 64).value == 1.0
    one.close()


def test_a_server_ends_with_who_asks(tmp_path: Path) -> None:
    asks = f"""
from pathlib import Path
from xray_runtime.rewards.code.client import CodeSandbox
one = CodeSandbox(Path({str(tmp_path)!r}))
one.score("def f(): pass", "f()", 60.0, 64)
print(one._process._process.pid, flush=True)
one.score("def f():\\n    while True: pass", "f()", 600.0, 64)
"""
    with subprocess.Popen([sys.executable, "-c", asks], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        server = psutil.Process(int(process.stdout.readline()))
        # Bubblewrap is two processes more.
        count = {"bubblewrap": 4}.get(confinement(), 2)
        while len(children := server.children(recursive=True)) < count:
            time.sleep(0.01)
        process.kill()
    gone, alive = psutil.wait_procs([server, *children], timeout=30)
    assert (len(gone), alive) == (count + 1, [])
