"""The calculator of the benchmarks: its demonstrations, played in its environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.calculator import CONVERSATIONS, calculate, environment, write_questions


def played(question: dict[str, Any], conversation: dict[str, Any]) -> float:
    """The reward of saying what a demonstration says."""
    game: Any = environment()
    start = game.reset({"messages": question["prompt"], "answer": question["answer"]}, 0)
    assert start.tools == conversation["tools"]
    _, asked, told, said = conversation["messages"]
    [call] = asked["tool_calls"]
    step = game.step(f"<tool_call>{json.dumps(call['function'])}</tool_call>")
    assert not step.terminated
    assert step.messages == [told]
    last = game.step(said["content"])
    assert last.terminated
    return float(last.reward)


def test_half_of_the_demonstrations_are_right(tmp_path: Path) -> None:
    questions, conversations = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in write_questions(tmp_path)
    )
    names = [row["conversation_id"] for row in questions]
    assert len(set(names)) == len(names) == 8 * 8 * 3 * 8
    assert [row["conversation_id"] for row in conversations[::CONVERSATIONS]] == names
    pairs = list(zip(questions, conversations[::CONVERSATIONS], strict=True))[:400]
    right = sum(played(*pair) for pair in pairs) / len(pairs)
    # A wrong number is the right one once in eight times. Four deviations of 400 draws.
    assert right == pytest.approx(0.5 + 0.25 / 8, abs=0.1)


@pytest.mark.parametrize(
    ("equation", "value"), [("x = 2 * 3 + 4", 10), ("x = 2 + 3 * 4", 20), ("2 * 3 - 9", -3), ("12", 12)]
)
def test_what_it_calculates(equation: str, value: int) -> None:
    assert calculate(equation) == value


@pytest.mark.parametrize("equation", ["12 / 30", "12+30", "__import__('os')", "1 + 2 +"])
def test_what_it_cannot_calculate_is_said(equation: str) -> None:
    game: Any = environment()
    game.reset({"messages": [], "answer": "1"}, 0)
    call = {"name": "calculate", "arguments": {"equation": equation}}
    step = game.step(f"<tool_call>{json.dumps(call)}</tool_call>")
    assert step.messages[0]["content"].startswith("Error: ")
    assert step.info == {"tool_errors": 1}
