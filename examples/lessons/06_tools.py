"""Lesson 6: tools. The policy calls a Python function, reads what it returns, and says it.

Half of the demonstrations say another number than the tool returned. SFT learns that too; GRPO does the rest.

    xray run examples.lessons.06_tools:tools
    xray rollouts ppo --output runs/tools --iteration 0       # episodes, with calls and rewards

Change next: a second function in `from_tools`; or a class as environment, as in examples/guess_number.py.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

from prefect import flow

import xray
from xray.environments import from_tools, tool_schema


def calculate(equation: str) -> int:
    """Calculate x.

    Args:
        equation: Such as x = 2 * 3 + 4.
    """
    first, _, second, _, third = equation.removeprefix("x = ").split()
    return int(first) * int(second) + int(third)


def environment() -> Any:
    """An episode's environment; the reward is 1 if the last reply is the number alone."""
    return from_tools([calculate], lambda task, reply: float(reply.strip() == task["answer"]))()


def write_rows(questions: Path, conversations: Path) -> None:
    """Questions with their answers, and two conversations about each: one right, one that ends in a random number."""
    draw, asked, said = random.Random(0), "", ""
    for numbers in itertools.product(range(2, 10), repeat=3):
        equation = "x = {} * {} + {}".format(*numbers)
        user = {"role": "user", "content": equation}
        call = {"type": "function", "function": {"name": "calculate", "arguments": {"equation": equation}}}
        result = str(calculate(equation))
        row = {"conversation_id": equation}  # A question is held out of both files or of neither: the id decides.
        asked += json.dumps(row | {"prompt": [user], "completion": "?", "answer": result}) + "\n"
        for answer in (result, str(draw.randrange(90))):
            messages = [
                user,
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "name": "calculate", "content": result},
                {"role": "assistant", "content": answer},
            ]
            said += json.dumps(row | {"messages": messages, "tools": [tool_schema(calculate)]}) + "\n"
    questions.parent.mkdir(parents=True, exist_ok=True)
    questions.write_text(asked)
    conversations.write_text(said)


@flow(task_runner=xray.task_runner(), persist_result=False)
def tools(output: str = "runs/tools", seed: int = 0, iterations: int = 30) -> None:
    """From answers that heed the tool half of the time to answers that do."""
    files = [Path(output).absolute() / name for name in ("questions.jsonl", "conversations.jsonl")]
    write_rows(*files)
    limits: dict[str, Any] = {"min_chars": 1, "max_chars": 1000, "max_prompt_tokens": 128, "heldout_fraction": 0.2}
    played: dict[str, Any] = {"environment": {"path": environment, "max_turns": 3, "max_tokens": 96}}
    groups: dict[str, Any] = {"prompts_per_iteration": 16, "samples_per_prompt": 8, "epochs": 1}
    with xray.workspace(output, project="tools", seed=seed):
        questions = xray.prepare(source=str(files[0]), columns=["answer"], name="questions", **limits)
        data = xray.prepare(source=str(files[1]), context_messages=None, **limits)
        base = xray.fresh_base(data, vocab_size=384, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4)
        sft = xray.sft(base, data=data, steps=1000, batch_size=16, max_response_tokens=48, lr=3e-3)
        policy = xray.ppo(sft, questions, method="grpo", iterations=iterations, max_new_tokens=40, **groups, **played)
        for name, model in {"before": sft, "after": policy}.items():
            xray.benchmark(model, questions, suite="environment", max_new_tokens=40, name=name, **played)
