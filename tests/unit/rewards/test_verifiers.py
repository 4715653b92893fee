"""Verifiers and their sandbox, in real processes: what is right, what is wrong, and what tries to get away."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.message_texts import Messages
from xray_runtime.data.pairs import TRAIN, Example, write_pairs
from xray_runtime.kernel.processes import TAG
from xray_runtime.rewards import sandbox, verifiers
from xray_runtime.rewards.source import Batch, Score
from xray_runtime.rewards.term import SourceRoute
from xray_runtime.rewards.verifier_config import CodeVerifier, JSONSchemaVerifier, MathVerifier, RegexVerifier, Verifier
from xray_runtime.rewards.verifiers import VerifierSource


@functools.lru_cache(maxsize=1)
def last_source(kind: type[Verifier], config: str) -> VerifierSource:
    """The source of the test before, if it had the same config: its processes have imported their libraries."""
    return VerifierSource(kind.model_validate_json(config), "verifier")


def verify(config: Verifier, replies: Sequence[str], column: Sequence[Any]) -> list[Score]:
    batch = Batch(["p"] * len(replies), replies, [[]] * len(replies), {"answer": column})
    return last_source(type(config), config.model_dump_json()).score(batch)


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
    assert values(MathVerifier(column="answer", limit_s=2.0), rows) == [0.0, 1.0, 0.0, 1.0]


def test_regex() -> None:
    found = [("x = 3 then x = 4", "4"), ("x = 3", "4"), ("none", "4")]
    assert values(RegexVerifier(pattern=r"x = (\d)", column="answer"), found) == [1.0, 0.0, 0.0]
    assert values(RegexVerifier(pattern=r"^\w+$", column="answer"), [("yes", "yes"), ("a b", "a")]) == [1.0, 0.0]
    assert values(RegexVerifier(pattern=r"^\w+$"), [("yes", None), ("a b", None)]) == [1.0, 0.0]
    # Backtracking of 2⁴⁰ steps.
    assert values(RegexVerifier(pattern=r"^(a+)+$", limit_s=0.5), [("a" * 40 + "b", None), ("aa", None)]) == [0.0, 1.0]


def test_verifiers_read_the_answer_and_not_the_reasoning() -> None:
    right, wrong, cut = "<think>\nIs it 7?\n</think>\n\n8", "<think>\n8\n</think>\n\nseven", "<think>\nIt is 8"
    assert values(MathVerifier(column="answer"), [(right, "8"), (wrong, "8"), (cut, "8")]) == [1.0, 0.0, 0.0]
    assert values(RegexVerifier(pattern=r"^\d$"), [(right, None), (wrong, None), (cut, None)]) == [1.0, 0.0, 0.0]
    schema = JSONSchemaVerifier(definition={"type": "integer"})
    assert values(schema, [(right, None), ("<think>\n8\n</think>\n\n{}", None)]) == [1.0, 0.0]
    code = "<think>\n```python\nx = 2\n```\n</think>\n\n```python\nx = 1\n```"
    assert values(CodeVerifier(column="answer"), [(code, "assert x == 1"), (code, "assert x == 2")]) == [1.0, 0.0]


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


@pytest.mark.parametrize(
    ("answer", "reply", "score"),
    [
        (7, "x = 7", 1.0),
        (7, "x = 7.0", 1.0),
        (7, "x = 7.5", 0.0),
        (7.0, "x = 7", 1.0),
        (0.1, "x = 0.10", 1.0),
        (1234, "x = 1,234", 1.0),
        (7, "x = seven", 0.0),
        ("7", "x = 7", 1.0),
        # Texts are compared as texts.
        ("7", "x = 7.0", 0.0),
        ("True", "x = True", 1.0),
    ],
)
def test_a_pattern_is_compared_by_type(answer: Any, reply: str, score: float) -> None:
    assert values(RegexVerifier(pattern=r"x = (.*)", column="answer"), [(reply, answer)]) == [score]


@pytest.mark.parametrize(
    ("config", "good", "bad"),
    [
        (MathVerifier(column="a"), ["4x-7", 3, 0.5, "#### 18", None], "4x-7 foo"),
        (MathVerifier(column="a"), ["1"], True),
        pytest.param(MathVerifier(column="a", limit_s=1.0), ["1"], "(" * 4000, marks=pytest.mark.long),
        (RegexVerifier(pattern="x", column="a"), ["1", 2, 0.5], False),
        (RegexVerifier(pattern="x", column="a"), ["1"], ["1"]),
        (JSONSchemaVerifier(column="a"), ["{}", {"type": "null"}, True], "{"),
        (JSONSchemaVerifier(column="a"), ["{}"], 7),
        (JSONSchemaVerifier(column="a"), ["{}"], {"type": "no"}),
        (CodeVerifier(column="a"), ["assert f()"], {"inputs": []}),
    ],
)
def test_a_column_is_checked_before_anything_runs(
    tmp_path: Path, config: Verifier, good: list[Any], bad: Any, message_texts: Messages
) -> None:
    def written(values: Sequence[Any]) -> None:
        rows = [
            Example(f"{row}-0", "c", [{"role": "user", "content": "q"}], "r", None, json.dumps({"a": value, "t": row}))
            for row, value in enumerate(values, start=1)
        ]
        write_pairs(tmp_path / TRAIN, Example, rows)

    source = VerifierSource(config, "ppo.rewards.0.verifier")
    written(good * 20)
    source.check(tmp_path, ["a", "t"])
    written([*good, bad])
    with message_texts.raises(ValueError):
        source.check(tmp_path, ["a", "t"])
    # Rows that the source does not score are not checked.
    VerifierSource(config, "v", SourceRoute(column="t", equals=1)).check(tmp_path, ["a", "t"])


CODE = CodeVerifier(column="answer", limit_s=10.0)


def test_code() -> None:
    rows = [
        ("Like this:\n```python\ndef f(x):\n    return x + 1\n```\nThat is it.", "assert f(1) == 2"),
        ("def f(x):\n    return x", ["assert f(1) == 1", "assert f(2) == 3"]),
        ("def f(x) return", "assert f(1) == 2"),
        ("import math, json, collections\ndef f(x): return math.sqrt(x)", "assert f(4) == 2"),
    ]
    assert values(CODE, rows) == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "reply",
    [
        "```python\ndef f(x): return x + 1\n```\nRun it:\n```bash\npython f.py\n```",
        "```python\ndef f(x): return x + 1\n```\nIt prints:\n```\n2\n```",
        "```py\ndef f(x): return x + 1\n```\n```json\n{}\n```\n```text\n2\n```",
        "```sh\npip install x\n```\n```\ndef f(x): return x + 1\n```",
        "~~~python\ndef f(x): return x + 1\n~~~\nThat is it.",
        "  ```Python3\n  def f(x): return x + 1\n  ```".replace("\n  ", "\n"),
        '```python title="f.py"\ndef f(x):\n    """```"""\n    return x + 1\n```',
        "```python\ndef f(x): return 0\n```\nNo:\n```python\ndef f(x): return x + 1\n```",
        "```python\ndef f(x): return x + 1\n",
        "def f(x): return x + 1",
    ],
)
def test_the_last_python_block_is_run(reply: str) -> None:
    assert values(CODE, [(reply, "assert f(1) == 2")]) == [1.0]


def test_code_says_why_and_what_is_no_fault_of_the_reply_fails() -> None:
    found = verify(CODE, ["def f(x): return 1"] * 3, ["assert f(1) == 2", "assert True", {"inputs": "1"}])
    assert [score.value for score in found[:1]] == [0.0]
    assert found[0].why == "line 1 of the tests: AssertionError"
    assert [math.isnan(score.value) for score in found[1:]] == [True, True]
    assert str(found[1].why).startswith("the tests do not use the code")
    assert str(found[2].why).startswith("column 'answer' must hold Python statements, a list of them, or")


def test_code_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TAG, "of-this-test")
    before = set(psutil.Process().children(recursive=True))
    loops = ["while True: pass", "import time; time.sleep(60)", "import os\ndef f(x):\n    while True: os.fork()"]
    source = VerifierSource(CodeVerifier(column="answer", limit_s=1.0), "verifier")
    batch = Batch(["p"] * 3, loops, [[]] * 3, {"answer": ["assert f(1) == 2"] * 3})
    assert [score.value for score in source.score(batch)] == [0.0, 0.0, 0.0]
    servers = set(psutil.Process().children()) - before
    # With bubblewrap, its two processes are around each.
    while around := {one for one in servers if one.name() == "bwrap"}:
        servers = (servers - around) | {child for one in around for child in one.children()}
    assert servers
    assert all(server.environ()[TAG] == "of-this-test" for server in servers)
    # The process of the tests answers by itself; the server ends it and the reply's a moment later.
    psutil.wait_procs([child for server in servers for child in server.children()], timeout=10)
    assert not any(server.children() for server in servers)
    del source
    psutil.wait_procs(servers, timeout=10)
    assert not any(server.is_running() for server in servers)


def test_a_sandbox_that_does_not_start_does_not_fail_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.sys, "executable", "/no/such/python")
    last_source.cache_clear()
    for config in (CODE, RegexVerifier(pattern="x", column="answer")):
        [score] = verify(config, ["x"], ["x"])
        assert math.isnan(score.value)
        assert "No such file" in str(score.why)


def test_a_process_that_ends_by_itself_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    marker = "import os, sys\nif not os.path.exists('second'):\n    open('second', 'w').close()\n    sys.exit(3)\n"
    last_source.cache_clear()
    # The second of a bubblewrap begins with an empty directory again.
    monkeypatch.setattr(sandbox, "confinement", lambda: "limits")
    monkeypatch.setattr(verifiers, "PROGRAM", verifiers.PROGRAM.replace("import runpy\n", f"{marker}import runpy\n"))
    assert values(RegexVerifier(pattern="x"), [("x", None)]) == [1.0]
    last_source.cache_clear()
    monkeypatch.setattr(verifiers, "PROGRAM", "import sys; print('no library', file=sys.stderr); sys.exit(3)")
    [score] = verify(RegexVerifier(pattern="x"), ["x"], [None])
    assert score.why == "RuntimeError: the verifier's process did not start: exit code 3: no library"
