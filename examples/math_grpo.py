"""A verifiable task by GRPO: a function checks each answer; there is no reward model and no critic.

Which is the largest of four digits? The demonstrations are right half of the time, so what SFT learns from them is
right half of the time too; the reward does the rest. Two minutes on two cores:

    xray run examples.math_grpo:math_grpo
    xray run examples.math_grpo:math_grpo --set method=rloo --set seed=1
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from prefect import flow

import xray


def correct(prompts: list[str], replies: list[str]) -> list[float]:
    """1 for the right reply, 0 for any other."""
    return [float(reply.strip() == max(prompt.split())) for prompt, reply in zip(prompts, replies, strict=True)]


def write_problems(path: Path, count: int = 2500, right: float = 0.5) -> None:
    """Problems with answers that are right with probability `right`."""
    random_ = random.Random(0)
    lines = []
    for number in random_.sample(range(10_000), count):
        digits = list(f"{number:04}")
        reply = max(digits) if random_.random() < right else random_.choice("0123456789")
        lines.append(json.dumps({"prompt": " ".join(digits), "completion": reply}) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


def half_right(problems: Path) -> tuple[xray.Handle, xray.Handle]:
    """(the dataset, a model trained on it): what every method starts from. Call it in a workspace."""
    data = xray.prepare(source=str(problems), min_chars=1, heldout_fraction=0.2)
    base = xray.fresh_base(data, vocab_size=300, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4)
    return data, xray.sft(base, data=data, steps=200, max_response_tokens=4)


@flow(task_runner=xray.task_runner(), persist_result=False)
def math_grpo(
    output: str = "runs/math-grpo", seed: int = 0, method: xray.Method = "grpo", iterations: int = 30
) -> None:
    """From demonstrations that are half right to a policy that is right."""
    problems = Path(output).absolute() / "problems.jsonl"
    write_problems(problems)
    with xray.workspace(output, project="math-grpo", seed=seed):
        data, sft = half_right(problems)
        policy = xray.ppo(
            sft,
            prompts=data,
            rewards=[xray.reward(correct)],
            method=method,
            iterations=iterations,
            prompts_per_iteration=32,
            minibatch_size=64,
            max_new_tokens=4,
            lr=1e-3,
            reward_scaling="none",
        )
        rewards = [xray.reward(correct)]
        result = xray.evaluate(policy, against=sft, prompts=data, rewards=rewards, num_prompts=512, max_new_tokens=4)
        xray.register(policy, result)


if __name__ == "__main__":
    math_grpo()
