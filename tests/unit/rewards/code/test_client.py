"""Tests of code as people have them, and what becomes of code and tests that are wrong."""

# ruff: noqa: E501

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from xray_runtime.rewards import sandbox as processes
from xray_runtime.rewards.code.client import CodeSandbox, read_tests
from xray_runtime.rewards.source import Score
from xray_runtime.sandboxes.confine import confinement

Judge = Callable[..., Score]

STACK = "class Stack:\n    def __init__(self): self.a = []\n    def push(self, x): self.a.append(x)\n    def pop(self): return self.a.pop()"
HUMAN_EVAL = """
METADATA = {'author': 'jt', 'dataset': 'test'}

def check(candidate):
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.3) == True
    assert candidate([1.0, 2.0, 5.9], 0.05) == False
"""
CLOSE = "def has_close(numbers, threshold):\n    s = sorted(numbers)\n    return any(b - a < threshold for a, b in zip(s, s[1:]))"


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        # MBPP, its list of asserts, one of which is a function named as a builtin is.
        ("def similar(a, b): return tuple(set(a) & set(b))", ["assert set(similar((3, 4, 5, 6), (5, 7, 4))) == set((4, 5))"]),
        ("def sum(a, b): return a - b - 5 + 11", "assert sum(10, 15) == 1"),
        ("from collections import Counter\ndef freq(x): return Counter(x)", "assert freq([1, 1, 2]) == {1: 2, 2: 1}"),
        ("import math\ndef root(x): return math.sqrt(x)", "assert math.isclose(root(2) ** 2, 2, rel_tol=1e-9)"),
        ("def root(x): return x ** .5", "import math\nassert math.isclose(root(2), 1.41421356, rel_tol=1e-6)"),
        # HumanEval; LeetCode; a class; a constant; an exception.
        (CLOSE, HUMAN_EVAL + "\ncheck(has_close)"),
        ("class Solution:\n    def twoSum(self, n, t): return [0, 1]", "assert Solution().twoSum([2, 7], 9) == [0, 1]"),
        ("class Solution:\n    def g(self, x): return x", "def check(f):\n    assert f(2) == 2\ncheck(Solution().g)"),
        (STACK, "s = Stack()\ns.push(1)\ns.push((2, 3))\nassert s.pop() == (2, 3)\nassert s.pop() == 1"),
        ("SIZE = 4", "assert SIZE == 4"),
        ("class A:\n    x: int = 1\nKIND = A.__annotations__['x'] is int\ndef kind(): return KIND", "assert kind() is True"),
        ("def f(x): raise ValueError('no')", "try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no'"),
        # Values of each kind, both ways; keywords; a generator; an object that goes there and back.
        ("def f(*a, **k): return a, k", "x = [None, True, 1, 10 ** 5000, 1.5, 2j, 'ä\\ud800', b'\\0', (1,), {2}, frozenset({3}), {(4,): [5]}]\n"
         "assert f(*x, a=x) == (tuple(x), {'a': x})\nassert [type(y) for y in f(*x)[0]] == [type(y) for y in x]"),
        ("def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2] and sorted(f(2)) == [0, 1]"),
        ("class A: pass\ndef same(a, b): return a is b", "a = A()\nassert same(a, a) and not same(a, A())"),
        ("def f(x):\n    x.append(1)\n    return x", "x = []\nassert f(x) == [1] and x == []"),
    ],
)  # fmt: skip
def test_code_that_is_right_passes_and_other_code_does_not(code: str, tests: Any, judge: Judge) -> None:
    found = judge(code, tests)
    assert found.value == 1.0, found.why
    if "return" in code:
        assert judge(code.replace("return", "return 7 if True else"), tests).value == 0.0


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def f(x) return", "the code does not load: SyntaxError: expected ':' (<reply>, line 1)"),
        ("def f(x): return 1", "line 1 of the tests: AssertionError"),
        ("def g(x): return 1", "line 1 of the tests: NameError: name 'f' is not defined"),
        ("import numpy", "the code does not load: ModuleNotFoundError: No module named 'numpy' (the code uses modules that are not loaded, which the sandbox refuses)"),
        ("import threading\ndef f(x): threading.Thread(target=print).start()", "line 1 of the tests: RuntimeError: can't start new thread (the code uses threads, which the sandbox refuses)"),
        ("def f(x): return open('/etc/passwd')", "line 1 of the tests: PermissionError: [Errno 1] Operation not permitted: '/etc/passwd' (the code uses files, processes or sockets, which the sandbox refuses)"),
        ("class A: pass\ndef f(x): return A()", "line 1 of the tests: TypeError: an object of class 'A' cannot be sent: tests only get plain values"),
        ("import os\ndef f(x): os.write(4, b'[3]\\n')", "the code's result cannot be sent: it is nested too deeply, or is not valid"),
        ("def f(x): return 'x' * 2 ** 25", "line 1 of the tests: ValueError: a value of more than 16777216 bytes cannot be sent"),
    ],
)  # fmt: skip
def test_a_wrong_reply_gets_its_reason(code: str, why: str, judge: Judge) -> None:
    assert judge(code, "assert f(1) == 2") == Score(0.0, why)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (HUMAN_EVAL, "the tests do not use the code; if they define check(candidate), end with check(NAME)"),
        ("assert True", "the tests do not use the code"),
        ("assert f(1) = 2", "the tests cannot be read"),
        (
            "assert f(lambda: 1) == 2",
            "the tests pass an object of class 'function' to the code: only plain values are allowed",
        ),
    ],
)
def test_tests_that_are_wrong_are_no_fault_of_the_reply(given: str, why: str, judge: Judge) -> None:
    found = judge("def f(x): return 2\ncandidate = 1\ndef check(*a): pass", given)
    assert math.isnan(found.value)
    assert str(found.why).startswith(why)


def test_programs_read_and_print(judge: Judge) -> None:
    cases = {"inputs": ["3\n1 2 3\n", "1\n5\n"], "outputs": ["6\n", "5"]}
    right = [
        "n = int(input())\nprint(sum(map(int, input().split())))",
        "import sys\ndef main():\n    print(sum(map(int, sys.stdin.read().split()[1:])))\nif __name__ == '__main__': main()",
        "print(sum(map(int, open(0).read().split()[1:])), '  \\n')\nexit()",
        "print(sum(map(int, open('/dev/stdin').read().split()[1:])))",
        "with open('/dev/stdin', 'rb') as file:\n    file.readline()\n    print(sum(map(int, file.readline().split())))",
        "from pathlib import Path\nprint(sum(map(int, Path('/dev/stdin').read_text().split()[1:])))",
        "import sys\nprint(sum(int(x) for line in list(sys.stdin)[1:] for x in line.split()))",
        "import os, atexit\nb = os.read(0, os.fstat(0).st_size).split()\natexit.register(lambda: print(sum(map(int, b[1:]))))",
    ]
    for code in right:
        assert judge(code, cases) == Score(1.0), code
    refuses = "which the sandbox refuses"
    or_sockets = f"processes or sockets, {refuses}"
    for code, why in {
        "print(6)": "case 1: it prints something else",
        "print(6); raise ValueError": "case 0: the code ended with exit code 1",
        "import os; print(6, flush=True); os.kill(os.getpid(), 9)": f"case 0: the code uses files, {or_sockets}",
        "import subprocess; subprocess.run(['true'])": f"case 0: the code uses files, {or_sockets}",
        "import socket; socket.socket()": f"case 0: the code uses files, {or_sockets}",
        "open('out', 'w')": f"case 0: the code uses files, {or_sockets}",
        "import threading; threading.Thread(target=print).start()": f"case 0: the code uses threads, {refuses}",
        "from concurrent.futures import ThreadPoolExecutor as T; T().submit(print)": f"case 0: the code uses threads, {refuses}",
        "import numpy as np": f"case 0: the code uses modules that are not loaded, {refuses}",
        "while True: print('x' * 1000)": "case 0: the code ended with exit code 1",
        "import time; time.sleep(60)": "case 0: no end within limit_s = 2",
        "import sys; print(6); sys.exit(3)": "case 0: the code ended with exit code 3",
    }.items():
        assert judge(code, cases, limit_s=2.0) == Score(0.0, why), code


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
            f"from xray_runtime.sandboxes.seccomp import computing_filter\n{fault}\nmain(",
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
