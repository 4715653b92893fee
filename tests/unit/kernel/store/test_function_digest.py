"""A reward function is known by its code and by the values it was made with, wherever it was written."""

from __future__ import annotations

import importlib
import itertools
import linecache
import math
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xray_runtime.kernel.store.code_digest import CodeDigestError, function_code
from xray_runtime.kernel.store.function_digest import function_sources, remember_sources

ROOT = Path(__file__).parents[4]
CELLS = itertools.count()


def cell(source: str, **names: Any) -> dict[str, Any]:
    """What a notebook's cell defines: source that only linecache has, run as `__main__`."""
    source, file = textwrap.dedent(source), f"<cell {next(CELLS)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space: dict[str, Any] = {"__name__": "__main__", **names}
    exec(compile(source, file, "exec"), space)
    return space


def digest(source: str, **names: Any) -> str:
    digests = function_code(cell(source, **names)["reward"], ["xray_runtime"]).modules
    assert list(digests) == ["__main__:reward"]
    return digests["__main__:reward"]


PLAIN = """
    import math
    WEIGHT = {"a": [1, 2.5, None, True], "b": {3, 4}}
    def helper(x):
        return reward and x * WEIGHT["a"][0]
    def reward(prompts, replies, scale=2):
        return [math.tanh(helper(len(r))) * scale for r in replies]
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("helper(x):\n", "helper(x):\n        # a comment\n        'Words.'\n"),
        ("(prompts, replies, scale=2):", "(prompts, replies,\n              scale=2):"),
        ("import math", "import math, json"),
        ("{3, 4}", "{4, 3}"),
    ],
)
def test_edits_without_effect_keep_the_digest(old: str, new: str) -> None:
    assert old in PLAIN
    assert digest(PLAIN.replace(old, new)) == digest(PLAIN)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scale=2", "scale=3"),
        ("2.5", "2.6"),
        ("[1, 2.5, None, True]", "(1, 2.5, None, True)"),
        ("True", "1"),
        ("x * WEIGHT", "x + WEIGHT"),
        ("math.tanh", "math.sin"),
        ("import math", "import cmath as math"),
    ],
)
def test_edits_with_effect_change_the_digest(old: str, new: str) -> None:
    assert old in PLAIN
    assert digest(PLAIN.replace(old, new)) != digest(PLAIN)


CLOSED = """
    def make(weight):
        def reward(prompts, replies):
            return [weight * len(r) for r in replies]
        return reward
    reward = make(WEIGHT)
"""
DECORATED = """
    import functools
    def doubled(function):
        @functools.wraps(function)
        def inner(*given):
            return [2 * x for x in function(*given)]
        return inner
    @doubled
    def reward(prompts, replies):
        return [len(r) for r in replies]
"""


def test_variables_around_it_and_decorators() -> None:
    one, two = (function_code(cell(CLOSED, WEIGHT=w)["reward"], []).modules for w in (1, 2))
    assert one != two
    assert one == function_code(cell(CLOSED, WEIGHT=1)["reward"], []).modules
    assert (
        len({digest(DECORATED), digest(DECORATED.replace("2 *", "3 *")), digest(DECORATED.replace("len", "max"))}) == 3
    )


def test_lambdas() -> None:
    def of(source: str) -> dict[str, str]:
        return function_code(cell(source)["reward"], []).modules

    assert of("reward = lambda p, r: [1.0] * len(r)") == of("reward = (lambda p, r: [1.0] * len(r))  # more")
    assert of("reward = lambda p, r: [1.0] * len(r)") != of("reward = lambda p, r: [2.0] * len(r)")
    with pytest.raises(CodeDigestError, match="its line has 2 lambdas"):
        of("reward, other = lambda p, r: 1, lambda p, r: 2")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("file = open('/dev/null')\ndef reward(p, r): return file", "reward: global 'file' is a TextIOWrapper"),
        ("class A: ...\ndef reward(p, r): return A()", "reward: global 'A' is a type"),
        ("def reward(p, r, x=object()): return x", "reward: the defaults is a object"),
        ("def reward(p, r): return missing", "reward: global 'missing' is not defined"),
        ("def reward(p, r): return __import__(p)", "reward: imports a module by a name made at run time"),
        ("class Reward:\n    def __call__(self, p, r): ...\nreward = Reward()", "the function is a Reward"),
        ("import functools\nreward = functools.partial(max)", "the function is a partial"),
    ],
)
def test_functions_without_a_digest_are_named(source: str, message: str) -> None:
    with pytest.raises(CodeDigestError, match=message) as caught:
        function_code(cell(source)["reward"], [])
    assert "\n" not in str(caught.value)


def test_no_source() -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("def reward(p, r): return 1", space)
    with pytest.raises(CodeDigestError, match="reward: its source is not available; put the function into a module"):
        function_code(space["reward"], [])
    with pytest.raises(CodeDigestError, match="must be 'module:function'"):
        function_code("vader", [])


def test_modules_and_libraries_of_a_cell() -> None:
    source = """
        from xray_runtime.kernel.seeding import derive_seed
        def reward(prompts, replies):
            import yaml
            from xray_runtime.data import gold
            return np.array([derive_seed(1, r) for r in replies])
    """
    reward = cell(source, np=np)["reward"]
    digests = function_code(reward, ["xray_runtime"]).modules
    assert {"__main__:reward", "xray_runtime.kernel.seeding", "xray_runtime.data.gold", "xray_runtime"} <= set(digests)
    assert set(function_code(reward, []).modules) == {"__main__:reward"}
    assert {"numpy", "PyYAML", "vaderSentiment"} <= set(function_code(reward, ["xray_runtime"]).libraries)


MODULE = {
    "__init__.py": "",
    "rewards.py": "from .helpers import score\nimport yaml\ndef reward(p, r): return score(r)\n"
    "def make(w):\n    def inner(p, r): return w\n    return inner\n",
    "helpers.py": "def score(r): return 1\n",
}


def test_imports_of_a_cell_are_followed_to_their_code() -> None:
    source = """
        import xray
        from xray import rewards

        def reward(prompts, replies):
            return [float(rewards.last_block(reply) == xray.data.TRAIN) for reply in replies]
    """
    digests = function_code(cell(source)["reward"], ["xray_runtime"]).modules
    assert {"xray_runtime.rewards.checks", "xray_runtime.data.pairs"} <= set(digests)
    assert "xray" not in digests


def test_a_function_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine").mkdir()
    for name, text in MODULE.items():
        (tmp_path / "mine" / name).write_text(text)
    importlib.invalidate_caches()
    named = function_code("mine.rewards:reward", ["xray_runtime"]).modules
    assert set(named) == {"mine", "mine.rewards", "mine.helpers"}
    assert function_code("mine.rewards:reward", []).libraries.keys() == {"PyYAML"}
    rewards: Any = importlib.import_module("mine.rewards")
    try:
        assert function_code(rewards.reward, ["xray_runtime"]).modules == named
        one, two = (function_code(rewards.make(w), []).modules for w in (1, 2))
        assert one.keys() == two.keys() == {*named, "mine.rewards:make.<locals>.inner"}
        assert one != two
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
            del sys.modules[name]
    (tmp_path / "mine/helpers.py").write_text("def score(r): return 22\n")
    after = function_code("mine.rewards:reward", ["xray_runtime"]).modules
    assert {name for name in after if after[name] != named[name]} == {"mine.helpers"}


def test_a_function_of_a_script(tmp_path: Path) -> None:
    def run(text: str) -> str:
        (tmp_path / "script.py").write_text(text)
        command, path = [sys.executable, str(tmp_path / "script.py")], {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=path, capture_output=True, text=True, check=True).stdout

    script = (
        "from xray_runtime.kernel.store.code_digest import function_code\n"
        "W = 1\n"
        "def reward(p, r):\n    return W\n"
        "print(function_code(reward, []).modules)\n"
    )
    first = run(script)
    assert run(script.replace("    return", "    # why\n    return")) == first
    assert run(script.replace("W = 1", "W = 2")) != first


def test_a_function_of_the_interpreter() -> None:
    functions: list[Callable[..., Any]] = [math.tanh, max]
    assert [function_code(function, []).modules for function in functions] == [{}, {}]


def test_a_cells_source_goes_with_it_to_a_process_that_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a notebook's worker reads it: the functions arrive as objects, and there is no file."""
    helper = cell("def helper(x):\n    return x + 1\n")["helper"]
    source = "def reward(prompts, replies):\n    return [helper(len(r)) for r in replies]\n"
    reward = cell(source, helper=helper)["reward"]
    before = function_code(reward, ["xray_runtime"]).modules
    sources = function_sources(reward)
    assert sorted(sources.values()) == ["def helper(x):\n    return x + 1\n", source]
    monkeypatch.setattr(linecache, "cache", {})
    with pytest.raises(CodeDigestError, match="its source is not available"):
        function_code(reward, ["xray_runtime"])
    remember_sources(sources)
    assert function_code(reward, ["xray_runtime"]).modules == before
