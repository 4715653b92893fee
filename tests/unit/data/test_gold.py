"""Gold scores: VADER's published examples, one's own function, and refusals."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from tests.message_texts import Messages
from xray_runtime.data.gold import load_gold
from xray_runtime.kernel.config.allowed_imports import VARIABLE, check_import


def test_vader_scores_the_reply_alone() -> None:
    gold = load_gold("vader", {})
    # From the README of vaderSentiment, and a text without any word of its lexicon.
    replies = ["VADER is smart, handsome, and funny.", "VADER is not smart, handsome, nor funny.", "", "the table"]
    assert gold(["I hate it"] * 4, replies) == [0.8316, -0.7424, 0.0, 0.0]
    assert gold([], []) == []


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_gold_score.py").write_text(
        "limit = 3\n"
        "def length(prompts, replies): return [len(r) for r in replies]\n"
        "def short(prompts, replies): return [1.0]\n"
        "def nan(prompts, replies): return [float('nan')] * len(replies)\n"
        "def words(prompts, replies): return replies\n"
    )
    (tmp_path / "own_broken_score.py").write_text("raise RuntimeError('no\\nweights')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own_gold_score", "own_broken_score"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv(VARIABLE, "own_gold_score, own_broken_score,no_such_module")
    return "own_gold_score"


def test_a_function_of_your_own(module: str) -> None:
    scores = load_gold(f"{module}:length", {})(["p", "p"], ["a", "abc"])
    assert scores == [1.0, 3.0]
    assert all(isinstance(score, float) for score in scores)


@pytest.mark.parametrize(
    "name",
    ["nope", "own_gold_score:", "no_such_module:f", "own_gold_score:f", "own_broken_score:f", "own_gold_score:limit"],
)
def test_a_gold_function_that_cannot_be_loaded_is_refused(module: str, name: str, message_texts: Messages) -> None:
    with message_texts.raises(ValueError):
        load_gold(name, {})


def test_modules_that_are_not_allowed_are_not_imported(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "another.module")
    with pytest.raises(ValueError, match=rf"gold: '{module}:length' is not allowed: .*=another.module,{module}$"):
        load_gold(f"{module}:length", {})
    assert module not in sys.modules
    # The name may come from a checkpoint that somebody else made: what a sharp eye would refuse, and what it would not.
    monkeypatch.delenv(VARIABLE)
    for name in ("os:system", "xray_runtime.kernel.files:write_whole", "builtins:exec"):
        with pytest.raises(ValueError, match="XRAY_ALLOWED_IMPORTS in the environment allows nothing"):
            load_gold(name, {})


@pytest.mark.parametrize(
    ("allowed", "path", "ok"),
    [
        ("a.b", "a.b:f", True),
        ("a.b", "a:f", False),
        ("a.b", "a.b.c:f", False),
        ("a.b", "a.bc:f", False),
        ("a.*", "a:f", True),
        ("a.*", "a.b.c:f", True),
        ("a.*", "ab:f", False),
        ("x, a.b ,", "a.b:f", True),
        ("", "a:f", False),
    ],
)
def test_which_modules_are_allowed(allowed: str, path: str, ok: bool) -> None:
    if ok:
        check_import(path, {VARIABLE: allowed})
    else:
        with pytest.raises(ValueError, match=f"{path!r} is not allowed"):
            check_import(path, {VARIABLE: allowed})


@pytest.mark.parametrize("allowed", ["*", "a.b:f", "my-package", "a..b", "a.*.b", "a;b"])
def test_an_invalid_list_of_modules_is_refused(allowed: str) -> None:
    with pytest.raises(ValueError, match=r"XRAY_ALLOWED_IMPORTS: .* is not allowed: must be a module"):
        check_import("a:f", {VARIABLE: allowed})


def test_a_function_that_was_handed_over_needs_no_import() -> None:
    def shorter(prompts: list[str], replies: list[str]) -> list[float]:
        return [-float(len(reply)) for reply in replies]

    gold = load_gold("__main__:test.<locals>.shorter", {"__main__:test.<locals>.shorter": shorter})
    assert gold(["p", "p"], ["a", "abc"]) == [-1.0, -3.0]
    for answer, why in {
        (1.0,): "must return one number per reply; for 2 replies it returned 1",
        (1.0, math.nan): "must return one finite number per reply; of 2 numbers 1 are finite",
        "12": "must return a list of numbers, one per reply, not '12'",
    }.items():
        broken = load_gold("__main__:f", {"__main__:f": lambda prompts, replies, answer=answer: answer})
        with pytest.raises(ValueError, match=f"^gold: '__main__:f' {why}$"):
            broken(["p", "p"], ["a", "abc"])
    # Its keys once became scores.
    keyed = load_gold("__main__:f", {"__main__:f": lambda prompts, replies: {1: "a", 2: "b"}})
    with pytest.raises(ValueError, match=r"one per reply, not \{1: 'a', 2: 'b'\}"):
        keyed(["p", "p"], ["a", "abc"])
