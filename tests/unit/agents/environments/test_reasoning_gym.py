"""Items of reasoning-gym as rows of a dataset, and the scores of replies to them."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xray_runtime.agents.environments.answer_checks import as_step
from xray_runtime.agents.environments.pool import EnvironmentPool
from xray_runtime.agents.environments.reasoning_gym import EVALUATES, REFUSED, SAFE, from_reasoning_gym, write_items

if importlib.util.find_spec("reasoning_gym") is None:  # its import takes seconds
    pytest.skip("the extra reasoning-gym is not installed", allow_module_level=True)

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
HERE = "tests.unit.agents.environments.test_reasoning_gym"


def environment() -> Any:
    return from_reasoning_gym()()


def written(path: Path, *arguments: Any, **config: Any) -> list[dict[str, Any]]:
    write_items(path, *arguments, **config)
    return [json.loads(line) for line in path.read_text().splitlines()]


def scored(row: dict[str, Any], reply: str, make: Callable[[], Any] = environment) -> tuple[float, int]:
    played = make()
    assert played.reset({"prompt": row["prompt"], "messages": [], "item": row["item"]}, 0) is None
    step = as_step(played.step(reply))
    assert step.terminated
    return step.reward, step.info["solved"]


def test_rows(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "sums.jsonl"
    rows = written(path, "chain_sum", range(5, 400), 3, **SUMS)
    assert rows[0] == {
        "prompt": "State the final answer to the following arithmetic problem: 6 + 2 =",
        "completion": "8",
        "item": {"task": "chain_sum", "seed": 3, "size": 400, "config": SUMS, "index": 5, "answer": "8"},
    }
    assert write_items(path, "chain_sum", range(5, 400), 3, **SUMS) == len(rows) == len({row["prompt"] for row in rows})
    # There are 2 × 10 × 10 questions.
    assert 150 < len(rows) <= 200
    later = written(path, "chain_sum", range(8, 20), 3, **SUMS)
    assert [row["prompt"] for row in later] == [row["prompt"] for row in rows][3 : 3 + len(later)]
    wrong = written(path, "chain_sum", range(4), reply=lambda item: f"not {item['answer']}", **SUMS)
    assert all(row["completion"].startswith("not ") for row in wrong)


def test_scores(tmp_path: Path) -> None:
    [row] = written(tmp_path / "sums.jsonl", "chain_sum", range(1), **SUMS)
    right = row["completion"]
    assert scored(row, f" {right}\n") == (1.0, 1)
    assert scored(row, "no") == (0.0, 0)
    assert scored(row, right + "x" * len(right)) == (0.5, 0)  # its part of the text
    tagged = from_reasoning_gym(lambda reply: reply.partition("=")[2] or None)
    assert scored(row, f"it is ={right}", tagged) == (1.0, 1)
    assert scored(row, right, tagged) == (0.0, 0)


def test_a_score_that_fails_is_a_wrong_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [row] = written(tmp_path / "items.jsonl", "rubiks_cube", range(1))
    played = environment()
    played.reset({"prompt": row["prompt"], "item": row["item"]}, 0)
    monkeypatch.setattr(type(played._items), "score_answer", lambda *_: float("no number"))
    step = as_step(played.step("R"))
    assert (step.reward, step.terminated, step.info["solved"]) == (0.0, True, 0)
    assert step.info["score_error"].startswith("ValueError: could not convert")


@pytest.mark.parametrize("task", SAFE)
def test_no_reply_is_run(task: str, tmp_path: Path) -> None:
    rows = written(tmp_path / "items.jsonl", task, range(3))
    forbidden = tmp_path / "forbidden"
    for row in rows:
        assert SAFE[task].fullmatch(row["completion"]), row["completion"]
        for code in (f"open({str(forbidden)!r}, 'w')", "().__class__", "9**9**9**9**9", "exit()", "f'{exit()}'"):
            assert scored(row, code) == (0.0, 0)
    assert not forbidden.exists()
    # Else the test above would hold for a score that never runs anything.
    if task in ("countdown", "string_insertion"):
        assert scored(rows[0], rows[0]["completion"]) == (1.0, 1)


def test_every_task_that_runs_replies_is_known() -> None:
    """By the calls in the scores of the package as it is installed."""
    found, names = set(), ("eval", "exec", "parse_expr", "sympify")
    import reasoning_gym

    for path in Path(reasoning_gym.__file__).parent.rglob("*.py"):
        text = path.read_text()
        # Most files are data.
        is_candidate = "def score_answer" in text and any(name in text for name in names)
        for function in ast.walk(ast.parse(text)) if is_candidate else ():
            if isinstance(function, ast.FunctionDef) and function.name == "score_answer":
                calls = [ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)]
                if any(call.rpartition(".")[2] in names for call in calls):
                    found.add(path.stem)
    # It runs the answer of an item that the package itself has drawn.
    found.remove("number_sorting")
    assert found == set(SAFE) | {task for task, why in REFUSED.items() if why == EVALUATES}


@pytest.mark.parametrize(
    ("arguments", "config", "message"),
    [
        (("no_task", range(1)), {}, "task = 'no_task' is not allowed: reasoning-gym has ab, acre, "),
        (("simple_integration", range(1)), {}, "task = 'simple_integration' is not allowed: its score would run"),
        (("chain_sum", range(0)), {}, r"indices = range\(0, 0\) is not allowed: must be a range of at least one"),
        (("chain_sum", range(-1, 3)), {}, r"indices = range\(-1, 3\) is not allowed"),
        (("chain_sum", range(1)), {"terms": 2}, r"chain_sum: reasoning-gym refuses the settings {'terms': 2} \("),
    ],
)
def test_invalid_items_are_refused(arguments: Any, config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        write_items(tmp_path / "items.jsonl", *arguments, **config)
    assert not list(tmp_path.iterdir())


def test_an_invalid_item_is_refused(tmp_path: Path) -> None:
    [row] = written(tmp_path / "sums.jsonl", "chain_sum", range(1), **SUMS)
    with pytest.raises(ValueError, match="item is None: must be the column that write_items wrote"):
        environment().reset({"prompt": row["prompt"]}, 0)
    with pytest.raises(ValueError, match="differs here: was it written with another version of reasoning-gym"):
        environment().reset({"prompt": "another", "item": row["item"]}, 0)
    with pytest.raises(ValueError, match="differs here"):
        environment().reset({"prompt": row["prompt"], "item": row["item"] | {"answer": "100"}}, 0)
    with pytest.raises(ValueError, match="task = 'composite' is not allowed"):
        environment().reset({"prompt": "p", "item": row["item"] | {"task": "composite"}}, 0)


def test_in_a_process(tmp_path: Path) -> None:
    rows = written(tmp_path / "sums.jsonl", "chain_sum", range(4), **SUMS)
    with EnvironmentPool(f"{HERE}:environment", 1, 60, 4096) as pool:
        for number, row in enumerate(rows):
            pool.reset(number, {"prompt": row["prompt"], "item": row["item"]}, 0).result()
        rewards = [pool.step(number, row["completion"]).result().reward for number, row in enumerate(rows)]
    assert rewards == [1.0] * 4
