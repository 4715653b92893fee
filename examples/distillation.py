"""A small student learns from a larger teacher, on its own replies: each sampled token is scored by the teacher.

Which is the largest of four digits? The student has seen demonstrations that are right half of the time, the teacher
those that are all right. Both have one tokenizer and one chat template, which the stage checks.

    xray run examples.distillation:distillation
    xray run examples.distillation:distillation --set iterations=20 --set seed=1
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from prefect import flow

import xray

LESSON = importlib.import_module("examples.lessons.05_grpo_with_a_verifier")
"""The problems of that lesson: Python's grammar has no name for a module that begins with a digit."""


@flow(task_runner=xray.task_runner(), persist_result=False)
def distillation(output: str = "runs/distillation", seed: int = 0, iterations: int = 60, steps: int = 150) -> None:
    """From demonstrations that are half right to a student that is about as good as its teacher."""
    folder = Path(output).absolute()
    for name, share in (("half", 0.5), ("all", 1.0)):
        LESSON.write_problems(folder / f"{name}-right.jsonl", right=share)
    rows: dict[str, Any] = {"columns": ["answer"], "min_chars": 1, "heldout_fraction": 0.2}
    heads: dict[str, Any] = {"vocab_size": 300, "num_heads": 4, "num_kv_heads": 4}
    exact = xray.reward(verifier={"kind": "regex", "pattern": r"^\s*\d\s*$", "column": "answer"})
    with xray.workspace(folder, project="distillation", seed=seed):
        half = xray.prepare(source=str(folder / "half-right.jsonl"), name="half-right", **rows)
        right = xray.prepare(source=str(folder / "all-right.jsonl"), name="all-right", **rows)
        small = xray.fresh_base(half, hidden_size=128, num_layers=2, **heads, name="small")
        large = xray.fresh_base(half, hidden_size=256, num_layers=4, **heads, name="large")
        teacher = xray.sft(large, data=right, steps=steps, max_response_tokens=4, lr=1e-3, name="teacher")
        student = xray.sft(small, data=half, steps=200, max_response_tokens=4, name="student")
        policy = xray.distill(
            student,
            teacher=teacher,
            prompts=half,
            iterations=iterations,
            max_new_tokens=4,
            lr=1e-3,
        )
        judged: dict[str, Any] = {"prompts": half, "rewards": [exact], "num_prompts": 512, "max_new_tokens": 4}
        xray.register(policy, xray.evaluate(policy, against=student, **judged))
