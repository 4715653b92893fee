"""Verifiers and their sandbox, in real processes: what is right, what is wrong, and what tries to get away."""

from __future__ import annotations

import contextlib
import math
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from xray_runtime.config.rewards import CodeVerifier, JSONSchemaVerifier, MathVerifier, RegexVerifier, Verifier
from xray_runtime.processes import TAG
from xray_runtime.rewards import sandbox, verifiers
from xray_runtime.rewards.sandbox import passes
from xray_runtime.rewards.seccomp import seccomp_filter
from xray_runtime.rewards.source import Batch, Score
from xray_runtime.rewards.verifiers import VerifierSource


def verify(config: Verifier, replies: Sequence[str], column: Sequence[Any]) -> list[Score]:
    batch = Batch(["p"] * len(replies), replies, [[]] * len(replies), {"answer": column})
    return VerifierSource(config).score(batch)


def values(config: Verifier, rows: Sequence[tuple[str, Any]]) -> list[float]:
    return [score.value for score in verify(config, *map(list, zip(*rows, strict=True)))]  # type: ignore[misc]


def test_math() -> None:
    rows = [
        (r"So it is $\boxed{\frac{1}{2}}$.", "0.5"),
        ("The answer is 42", 42),
        ("The answer is 43", 42),
        ("$1 + x^2$", "x^2+1"),
        ("It is 7, no: 1,000", "1000"),
        ("I do not know", "1"),
        ("", "1"),
    ]
    assert values(MathVerifier(column="answer"), rows) == [1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0]


def test_math_that_takes_too_long_is_wrong_and_the_next_is_checked() -> None:
    rows = [("$9^{9^{9^{9}}}$", "7"), ("8", "8"), ("9", "8"), ("8", "8")]
    start = time.monotonic()
    assert values(MathVerifier(column="answer", limit_s=2.0), rows) == [0.0, 1.0, 0.0, 1.0]
    assert time.monotonic() - start < 60.0


def test_regex() -> None:
    found = [("x = 3 then x = 4", "4"), ("x = 3", "4"), ("none", "4")]
    assert values(RegexVerifier(pattern=r"x = (\d)", column="answer"), found) == [1.0, 0.0, 0.0]
    assert values(RegexVerifier(pattern=r"^\w+$", column="answer"), [("yes", "yes"), ("a b", "a")]) == [1.0, 0.0]
    assert values(RegexVerifier(pattern=r"^\w+$"), [("yes", None), ("a b", None)]) == [1.0, 0.0]
    # Backtracking of 2⁴⁰ steps.
    assert values(RegexVerifier(pattern=r"^(a+)+$", limit_s=0.5), [("a" * 40 + "b", None), ("aa", None)]) == [0.0, 1.0]


def test_json_schema() -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    rows = [('{"a": 1}', None), ('Here:\n```json\n{"a": 2}\n```\nDone.', None), ('{"a": "1"}', None), ("a: 1", None)]
    assert values(JSONSchemaVerifier(definition=schema), rows) == [1.0, 1.0, 0.0, 0.0]
    # Python reads these, JSON does not know them; and what nests too deep is no fault of the system's.
    numbers = JSONSchemaVerifier(definition={"type": ["number", "array"]})
    given = [("1e3", None), ("NaN", None), ("[1, -Infinity]", None), ("[" * 60_000, None)]
    assert values(numbers, given) == [1.0, 0.0, 0.0, 0.0]
    by_row = JSONSchemaVerifier(column="answer")
    assert values(by_row, [("3", {"type": "integer"}), ("3", '{"type": "string"}')]) == [0.0 + 1.0, 0.0]
    [broken] = verify(by_row, ["3"], [{"type": "number?"}])
    assert math.isnan(broken.value)
    assert "not a JSON Schema" in str(broken.why)
    # Nothing is fetched from where a schema points to.
    [remote] = verify(by_row, ["3"], [{"$ref": "http://127.0.0.1:9/schema.json"}])
    assert math.isnan(remote.value)


def test_a_row_without_ground_truth_is_a_failure() -> None:
    [found, other] = verify(RegexVerifier(pattern="x", column="answer"), ["x", "x"], [None, "x"])
    assert math.isnan(found.value)
    assert found.why == "column 'answer' has no value in a row"
    assert other == Score(1.0)


CODE = CodeVerifier(column="answer", limit_s=10.0)


def test_code() -> None:
    rows = [
        ("Like this:\n```python\ndef f(x):\n    return x + 1\n```\nThat is it.", "assert f(1) == 2"),
        ("def f(x):\n    return x", ["assert f(1) == 1", "assert f(2) == 3"]),
        ("def f(x) return", "assert f(1) == 2"),
        ("import math, json, collections\ndef f(x): return math.sqrt(x)", "assert f(4) == 2"),
    ]
    assert values(CODE, rows) == [1.0, 0.0, 0.0, 1.0]


def sandboxes() -> list[int]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if "-S" in process.cmdline():
                found.append(process.pid)
    return found


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import os\nwhile True: os.fork()",
        "import threading; threading.Thread(target=print).start()",
        "import subprocess; subprocess.run(['sleep', '60'])",
        "x = bytearray(2**30)",
        "open('large', 'wb').write(bytes(2**25))",
        "import os; os.kill(os.getppid(), 9)",
        # Ends well before the tests are done.
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "print('started' + 'x' * 32)",
        "import os; os.write(1, b'started')",
        "raise SystemExit",
    ],
)
def test_code_that_takes_more_than_it_may_is_wrong(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TAG, "of-this-test")
    start = time.monotonic()
    assert not passes(code, "raise AssertionError", limit_s=1.0, memory_mb=256)
    assert time.monotonic() - start < 30.0
    assert sandboxes() == []


def test_code_sees_nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    kept = (tmp_path / "ours").open("w")
    look = f"""
import os, sys
assert set(os.environ) <= {{"PYTHONHASHSEED", "{TAG}", "LC_CTYPE"}}, os.environ
assert os.listdir() == []
assert os.getsid(0) == os.getpid() != {os.getsid(0)}
assert not any("site-packages" in path for path in sys.path)
for number in range(3, 64):
    try:
        os.fstat(number)
    except OSError:
        continue
    assert os.readlink(f"/proc/self/fd/{{number}}") != {str(tmp_path / "ours")!r}
"""
    assert passes(look, "", limit_s=10.0, memory_mb=256)
    kept.close()


@pytest.mark.parametrize(
    "call",
    [
        "open('mine', 'w')",
        "open(THEIRS, 'a')",
        "os.unlink(THEIRS)",
        "os.rename(THEIRS, THEIRS + '2')",
        "os.chmod(THEIRS, 0)",
        "os.truncate(THEIRS, 0)",
        "os.mkdir('directory')",
        "os.symlink(THEIRS, 'link')",
        "os.kill(os.getppid(), 0)",
        "os.kill(-1, 0)",
        "socket.socket()",
        "socket.create_connection(('127.0.0.1', 9))",
        "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
        "resource.setrlimit(resource.RLIMIT_NPROC, (9, 9))",
    ],
)
def test_code_changes_no_file_and_reaches_no_process_and_no_network(call: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("x")
    # Readable by whom the sandbox is: what is refused is refused by the filter.
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o777)
    theirs.chmod(0o666)
    code = f"""
import os, resource, socket
THEIRS = {str(theirs)!r}
assert open(THEIRS).read() == "x"
try:
    {call}
except (PermissionError, ValueError) as error:
    refused = True
"""
    assert passes(code, "assert refused", limit_s=10.0, memory_mb=256)
    assert theirs.read_text() == "x"


def test_only_known_machines_have_a_filter() -> None:
    # Of each step the places it may jump to lie within the program.
    for machine in ("x86_64", "aarch64"):
        steps = list(struct.iter_unpack("HBBI", seccomp_filter(machine)))
        for place, (_, true, false, _) in enumerate(steps):
            assert place + 1 + max(true, false) <= len(steps)
    with pytest.raises(OSError, match="the sandbox does not support sparc"):
        seccomp_filter("sparc")


def test_a_sandbox_that_does_not_start_is_no_wrong_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.sys, "executable", "/no/such/python")
    for config in (CODE, RegexVerifier(pattern="x", column="answer")):
        [score] = verify(config, ["x"], ["x"])
        assert math.isnan(score.value)
        assert "No such file" in str(score.why)


def test_a_process_that_ends_by_itself_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    marker = "import os, sys\nif not os.path.exists('second'):\n    open('second', 'w').close()\n    sys.exit(3)\n"
    monkeypatch.setattr(verifiers, "PROGRAM", verifiers.PROGRAM.replace("import runpy\n", f"{marker}import runpy\n"))
    assert values(RegexVerifier(pattern="x"), [("x", None)]) == [1.0]
    monkeypatch.setattr(verifiers, "PROGRAM", "import sys; sys.exit(3)")
    [score] = verify(RegexVerifier(pattern="x"), ["x"], [None])
    assert score.why == "RuntimeError: the verifier's process did not start"
