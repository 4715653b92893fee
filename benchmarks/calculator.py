"""A tool for `benchmarks.environments`: the policy calls a calculator, reads what it returns, and says it.

The demonstrations go wrong half of the time, in the call or in what they say of it. So does what SFT learns from them.
The same with a smaller tool is lesson 6 of `examples/`.
"""

from __future__ import annotations

import itertools
import json
import operator
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xray
from xray.environments import from_tools, tool_schema

CONVERSATIONS = 3
SIGNS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculate(equation: str) -> int:
    """Calculate x, from left to right.

    Args:
        equation: Such as x = 2 * 3 + 4.
    """
    first, *rest = equation.removeprefix("x = ").split()
    value = int(first)
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        value = SIGNS[sign](value, int(number))
    return value


def is_right(task: Mapping[str, Any], reply: str) -> float:
    """1 for the number alone."""
    return float(reply.strip() == task["answer"])


def environment() -> Any:
    """The environment of one episode."""
    return from_tools([calculate], is_right)()


def write_questions(directory: Path) -> tuple[Path, Path]:
    """(questions with their answers, conversations about them that go wrong half of the time)."""
    random_ = random.Random(0)
    tools = [tool_schema(calculate)]
    questions: list[dict[str, Any]] = []
    conversations: list[dict[str, Any]] = []
    digits = range(2, 10)
    for a, b, sign, c in itertools.product(digits, digits, SIGNS, digits):
        equation = f"x = {a} * {b} {sign} {c}"
        # By its name a question is held out of both files, or of none.
        asked = {"role": "user", "content": equation}
        row = {"conversation_id": equation}
        questions.append(row | {"prompt": [asked], "completion": "?", "answer": str(calculate(equation))})
        for _ in range(CONVERSATIONS):
            slip = random_.choice(("number", "answer", "none", "none"))
            called = f"x = {random_.choice(digits)} * {b} {sign} {c}" if slip == "number" else equation
            found = calculate(called)
            said = random_.randrange(100) if slip == "answer" else found
            call = {"type": "function", "function": {"name": "calculate", "arguments": {"equation": called}}}
            messages = [
                asked,
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "name": "calculate", "content": str(found)},
                {"role": "assistant", "content": str(said)},
            ]
            conversations.append(row | {"messages": messages, "tools": tools})
    paths = directory / "questions.jsonl", directory / "conversations.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    for path, rows in zip(paths, (questions, conversations), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def start(directory: Path) -> tuple[xray.Handle, xray.Handle]:
    """(questions, a model trained on conversations): what learning begins with. Call it in a workspace."""
    questions, conversations = write_questions(directory)
    limits: dict[str, Any] = {"min_chars": 1, "max_chars": 1000, "max_prompt_tokens": 128, "heldout_fraction": 0.15}
    asked = xray.prepare(source=str(questions), columns=["answer"], **limits)
    data = xray.prepare(source=str(conversations), context_messages=None, **limits)
    base = xray.fresh_base(data, vocab_size=384, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4)
    return asked, xray.sft(base, data=data, steps=1500, batch_size=16, max_response_tokens=48, lr=3e-3)


PLAYED: dict[str, Any] = {"environment": {"path": environment, "max_turns": 3, "max_tokens": 96}, "max_new_tokens": 40}
