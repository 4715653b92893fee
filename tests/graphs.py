"""Nine graphs that a unit test plans and `tests/e2e/test_any_graph.py` runs: five examples, and four here."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect import flow

import xray

SIZES: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}


@flow(task_runner=xray.task_runner(), persist_result=False)
def distillation(output: str = "runs/distillation", steps: int = 10) -> None:
    """A kind of one's own: a large model is tuned, and teaches a small one."""
    from tests.imitate import imitate

    with xray.workspace(output, project="distillation"):
        chats = xray.prepare(source="chitchat", max_prompt_tokens=64)
        small = xray.fresh_base(chats, **SIZES, name="small")
        large = xray.fresh_base(chats, **SIZES | {"num_layers": 8}, name="large")
        teacher = xray.sft(large, data=chats, steps=steps, name="teacher")
        imitate(small, teacher, chats, steps=steps)


@flow(task_runner=xray.task_runner(), persist_result=False)
def sft_alone(output: str = "runs/sft", steps: int = 10, runtime: Any = None) -> None:
    """Nothing but SFT."""
    with xray.workspace(output, project="sft-alone", runtime=runtime):
        chats = xray.prepare(source="chitchat", max_prompt_tokens=64)
        xray.sft(xray.fresh_base(chats, **SIZES), data=chats, steps=steps)


@flow(task_runner=xray.task_runner(), persist_result=False)
def evaluate_alone(output: str = "runs/evaluate", num_prompts: int = 16) -> None:
    """Nothing but an evaluation."""
    with xray.workspace(output, project="evaluate-alone"):
        chats = xray.prepare(source="chitchat", max_prompt_tokens=64)
        base = xray.fresh_base(chats, **SIZES)
        xray.evaluate(base, against=base, prompts=chats, gold="vader", num_prompts=num_prompts)


@flow(task_runner=xray.task_runner(), persist_result=False)
def self_distillation(output: str = "runs/self-distillation", iterations: int = 4) -> None:
    """A policy learns from itself: from what it says once it is shown the right answer (SDFT)."""
    lesson = importlib.import_module("examples.lessons.05_grpo_with_a_verifier")
    problems = Path(output).absolute() / "problems.jsonl"
    lesson.write_problems(problems)
    shown: dict[str, Any] = {"source": "policy", "demonstration": "answer"}
    with xray.workspace(output, project="self-distillation"):
        data, sft = lesson.half_right(problems)
        xray.distill(sft, prompts=data, distillation=shown, iterations=iterations, max_new_tokens=4, lr=1e-3)


@dataclass(frozen=True)
class GraphCase:
    """One graph, how it is made small, and what is searched in it."""

    flow: str
    """`module:flow`."""
    until: str
    """The stage that is killed, replayed and measured by the search."""
    fields: dict[str, Any]
    """The search space."""
    metric: str
    """The metric of `until` that the search optimizes."""
    mode: str = "max"
    small: dict[str, Any] = field(default_factory=dict)
    """`--set` of real runs."""
    imports: tuple[str, ...] = ()
    """Modules that register its own kinds."""


LR = {"low": 1e-5, "high": 1e-3, "log": True}
FEW_CHATS = {"prepare.max_conversations": 200, "prepare.context_messages": 1}
FEW_REPLIES = {"ppo.prompts_per_iteration": 8, "ppo.max_new_tokens": 8}
FEW_JUDGED = {"evaluate.num_prompts": 8, "evaluate.max_new_tokens": 8}
GRAPHS: dict[str, GraphCase] = {
    "two judges": GraphCase(
        "examples.two_judges:two_judges",
        "ppo",
        {"iterations": {"low": 1, "high": 3}, "ppo.rewards.1.weight": {"low": 0.1, "high": 1.0}},
        "reward/mean",
        small={"steps": 6, "iterations": 3, "upbeat-pairs.num_pairs": 32, "interesting-pairs.num_pairs": 32}
        | FEW_REPLIES
        | {"ppo.minibatch_size": 8}
        | FEW_JUDGED,
    ),
    "online DPO": GraphCase(
        "examples.online_dpo:online_dpo",
        "dpo-1",
        {"dpo-1.beta": {"low": 0.01, "high": 1.0, "log": True}},
        "dpo/loss",
        "min",
        small={"steps": 60, "rounds": 1, "num_prompts": 48},
    ),
    "tools": GraphCase(
        "examples.lessons.06_tools:tools",
        "ppo",
        {"iterations": {"low": 1, "high": 3}, "ppo.lr": LR},
        "reward/mean",
        small={
            "iterations": 3,
            "sft.steps": 30,
            "ppo.prompts_per_iteration": 4,
            "before.num_prompts": 8,
            "after.num_prompts": 8,
        },
    ),
    "own kind": GraphCase(
        "tests.graphs:distillation",
        "imitate",
        {"imitate.lr": LR},
        "imitate/loss",
        "min",
        small={"steps": 6, "imitate.steps": 30} | FEW_CHATS,
        imports=("tests.imitate",),
    ),
    "self-distillation": GraphCase(
        "tests.graphs:self_distillation",
        "distill",
        {"distill.distillation.coef": {"low": 0.5, "high": 2.0}, "iterations": {"low": 1, "high": 3}},
        "kl/teacher_k1",
        "min",
        small={"iterations": 4, "sft.steps": 30, "distill.prompts_per_iteration": 16, "distill.minibatch_size": 8},
    ),
    "rejection sampling": GraphCase(
        "examples.lessons.03_own_reward:own_reward",
        "sft-1",
        {"best-1.samples": {"low": 2, "high": 4}},
        "sft/heldout_loss",
        "min",
        small={"steps": 20, "rounds": 1, "num_prompts": 32, "best-1.min_reward": 0.0},
    ),
    "own advantage": GraphCase(
        "examples.lessons.04_own_algorithm:own_algorithm",
        "ppo",
        {"ppo.kl.coef": {"low": 0.0, "high": 0.1}, "iterations": {"low": 1, "high": 3}},
        "reward/mean",
        small={"iterations": 3, "sft.steps": 10, "ppo.minibatch_size": 16} | FEW_CHATS | FEW_REPLIES | FEW_JUDGED,
    ),
    "SFT alone": GraphCase(
        "tests.graphs:sft_alone",
        "sft",
        {"sft.lr": {"low": 1e-4, "high": 1e-2}},
        "sft/heldout_loss",
        "min",
        small={"steps": 60} | FEW_CHATS,
    ),
    "evaluate alone": GraphCase(
        "tests.graphs:evaluate_alone",
        "evaluate",
        {"evaluate.temperature": {"choices": [0.5, 1.0]}},
        "evaluate/win_rate",
        small={"num_prompts": 8, "evaluate.max_new_tokens": 8} | FEW_CHATS,
    ),
}
