"""An agent of somebody else learns by GRPO: `guesser.play` calls what it takes for OpenAI, and returns its reward.

The demonstrations name the largest of three digits half of the time, so what SFT learns from them does too.

    xray run examples.agents.largest_digit:largest_digit
    xray rollouts ppo --output runs/largest-digit --iteration 19

Change next: a command in place of the function, `environment={"command": ["python", "agent.py"], "venv": "…"}`, which
XRAY_ALLOWED_COMMANDS and XRAY_ALLOWED_PATHS must allow.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

from prefect import flow

import xray
from examples.agents.guesser import play


def write_rows(questions: Path, conversations: Path) -> None:
    """Questions with their answers, and two conversations about each: one right, one with any digit."""
    draw, asked, said = random.Random(0), "", ""
    for digits in itertools.product(range(10), repeat=3):
        row = {"conversation_id": str(digits)}
        user, answer = {"role": "user", "content": " ".join(map(str, digits))}, str(max(digits))
        asked += json.dumps(row | {"prompt": [user], "completion": "?", "answer": answer}) + "\n"
        for reply in (answer, str(draw.randrange(10))):
            messages = [user, {"role": "assistant", "content": reply}]
            said += json.dumps(row | {"messages": messages}) + "\n"
    questions.parent.mkdir(parents=True, exist_ok=True)
    questions.write_text(asked)
    conversations.write_text(said)


def half_right(output: Path, steps: int) -> tuple[xray.Handle, xray.Handle]:
    """Questions, and a policy that answers half of them."""
    files = [output / name for name in ("questions.jsonl", "conversations.jsonl")]
    write_rows(*files)
    limits: dict[str, Any] = {
        "min_chars": 1,
        "max_prompt_tokens": 64,
        "heldout_fraction": 0.2,
        "validation_fraction": 0.1,
    }
    questions = xray.prepare(source=str(files[0]), columns=["answer"], name="questions", **limits)
    data = xray.prepare(source=str(files[1]), context_messages=None, **limits)
    base = xray.fresh_base(data, vocab_size=300, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4)
    return questions, xray.sft(base, data=data, steps=steps, batch_size=64, lr=1e-3)


@flow(task_runner=xray.task_runner(), persist_result=False)
def largest_digit(
    output: str = "runs/largest-digit", seed: int = 0, steps: int = 400, iterations: int = 20, heldout: int = 128
) -> None:
    """From digits of which half are right to right ones, measured on `heldout` questions."""
    played: dict[str, Any] = {"environment": {"agent": play, "max_tokens": 48}, "max_new_tokens": 4}
    with xray.workspace(output, project="largest-digit", seed=seed):
        questions, sft = half_right(Path(output).absolute(), steps)
        policy = xray.ppo(
            sft,
            prompts=questions,
            method="grpo",
            iterations=iterations,
            prompts_per_iteration=16,
            samples_per_prompt=8,
            epochs=1,
            lr=5e-4,
            validation={"num_prompts": 16},
            **played,
        )
        for name, model in {"before": sft, "after": policy}.items():
            xray.benchmark(model, questions, suite="environment", num_prompts=heldout, name=name, **played)
