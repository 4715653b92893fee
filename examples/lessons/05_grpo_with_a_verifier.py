"""Lesson 5: GRPO with a verifier. A rule checks each answer; there is no reward model and no critic.

Which is the largest of four digits? The demonstrations are right half of the time, so what SFT learns from them is
right half of the time too; the verifier, which compares each reply with the row's column `answer`, does the rest.

    xray run examples.lessons.05_grpo_with_a_verifier:grpo_with_a_verifier
    xray run examples.lessons.05_grpo_with_a_verifier:grpo_with_a_verifier --set method=rloo --set seed=1

Change next: `verifier={"kind": "math", …}` or `"code"` (docs/inputs.md); benchmarks/learning.py compares methods.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from prefect import flow

import xray


def write_problems(path: Path, count: int = 2500, right: float = 0.5) -> None:
    """Problems with answers that are right with probability `right`."""
    draw, lines = random.Random(0), []
    for number in draw.sample(range(10_000), count):
        digits = list(f"{number:04}")
        reply = max(digits) if draw.random() < right else draw.choice("0123456789")
        lines.append(json.dumps({"prompt": " ".join(digits), "completion": reply, "answer": max(digits)}) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


def half_right(problems: Path) -> tuple[xray.Handle, xray.Handle]:
    """(the dataset, a model trained on it): what every method starts from. Call it in a workspace."""
    data = xray.prepare(source=str(problems), columns=["answer"], min_chars=1, heldout_fraction=0.2)
    base = xray.fresh_base(data, vocab_size=300, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4)
    return data, xray.sft(base, data=data, steps=200, max_response_tokens=4)


@flow(task_runner=xray.task_runner(), persist_result=False)
def grpo_with_a_verifier(
    output: str = "runs/grpo", seed: int = 0, method: xray.Method = "grpo", iterations: int = 30
) -> None:
    """From demonstrations that are half right to a policy that is right."""
    problems = Path(output).absolute() / "problems.jsonl"
    write_problems(problems)
    rewards = [xray.reward(verifier={"kind": "regex", "pattern": r"^\s*\d\s*$", "column": "answer"})]
    sizes: dict[str, Any] = {"prompts_per_iteration": 32, "minibatch_size": 64, "max_new_tokens": 4}
    with xray.workspace(output, project="grpo", seed=seed):
        data, sft = half_right(problems)
        policy = xray.ppo(
            sft,
            prompts=data,
            rewards=rewards,
            method=method,
            iterations=iterations,
            lr=1e-3,
            reward_scaling="none",
            **sizes,
        )
        result = xray.evaluate(policy, against=sft, prompts=data, rewards=rewards, num_prompts=512, max_new_tokens=4)
        xray.register(policy, result)
