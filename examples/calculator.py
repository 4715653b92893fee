"""Tools by GRPO: the policy calls one of two Python functions, reads what it returns, and says it.

The demonstrations go wrong half of the time: another function, a wrong digit, a wrong answer. So does what SFT learns
from them; the reward does the rest. Three minutes on two cores:

    xray run examples.calculator:calculator
    xray rollouts ppo --output runs/calculator --iteration 0
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import flow

import xray
from xray_runtime.environments.adapters import from_tools, tool_schema

COUNT, RIGHT = 4000, 0.5


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Another.
    """
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: One.
        b: Another.
    """
    return a * b


TOOLS = {"plus": add, "times": multiply}


def is_right(task: Mapping[str, Any], reply: str) -> float:
    """1 for the number alone."""
    return float(reply.strip() == task["answer"])


def tools() -> Any:
    """One environment an episode."""
    return from_tools([add, multiply], is_right)()


def write_questions(directory: Path) -> tuple[Path, Path]:
    """(questions with their answers, conversations about them that go wrong half of the time)."""
    random_ = random.Random(0)
    schemas = [tool_schema(function) for function in TOOLS.values()]
    questions, conversations = [], []
    for number in random_.sample(range(90 * 90 * 2), COUNT):
        word = ("plus", "times")[number % 2]
        a, b = number // 2 // 90 + 10, number // 2 % 90 + 10
        # By its name a question is held out of both files or of none.
        question = {"conversation_id": f"{a} {word} {b}"}
        asked = {"role": "user", "content": f"What is {a} {word} {b}?"}
        questions.append(question | {"prompt": [asked], "completion": "?", "answer": str(TOOLS[word](a, b))})
        slip = random_.choice(("word", "number", "answer")) if random_.random() > RIGHT else None
        called = TOOLS[random_.choice(list(TOOLS)) if slip == "word" else word]
        arguments = {"a": random_.randrange(10, 100) if slip == "number" else a, "b": b}
        found = called(**arguments)
        call = {"type": "function", "function": {"name": called.__name__, "arguments": arguments}}
        said = random_.randrange(100, 1000) if slip == "answer" else found
        messages = [
            asked,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": str(found)},
            {"role": "assistant", "content": str(said)},
        ]
        conversations.append(question | {"messages": messages, "tools": schemas})
    paths = directory / "questions.jsonl", directory / "conversations.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    for path, rows in zip(paths, (questions, conversations), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


@flow(task_runner=xray.task_runner(), persist_result=False)
def calculator(
    output: str = "runs/calculator", seed: int = 0, method: str = "grpo", iterations: int = 40, lr: float = 1e-3
) -> None:
    """From calls that are right half of the time to calls that are right."""
    questions, conversations = write_questions(Path(output).absolute())
    with xray.workspace(output, project="calculator", seed=seed):
        limits = {"min_chars": 1, "max_chars": 1000, "max_prompt_tokens": 256}
        asked = xray.prepare(source=str(questions), columns=["answer"], **limits)
        data = xray.prepare(source=str(conversations), context_messages=None, **limits)
        base = xray.fresh_base(data, vocab_size=384, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4)
        sft = xray.sft(base, data=data, steps=400, max_response_tokens=64, lr=4e-3)
        xray.ppo(
            sft,
            prompts=asked,
            environment={"path": tools, "max_turns": 3, "max_tokens": 192},
            method=method,
            iterations=iterations,
            prompts_per_iteration=16 if method != "ppo" else 128,
            samples_per_prompt=8 if method != "ppo" else 1,
            minibatch_size=64,
            max_new_tokens=48,
            lr=lr,
        )


if __name__ == "__main__":
    calculator()
