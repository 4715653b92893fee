"""Lesson 7: plan for GPUs. The planner reads the graph, and says where each model goes before anything runs.

SmolLM2-135M learns to be kind from a function alone, by GRPO on its two top layers. The reward knows three dozen words;
VADER, which knows thousands of them, negation and emphasis, judges, and is never trained on.

    xray plan examples.lessons.07_plan_for_gpus:plan_for_gpus --devices 8 --memory-gib 80
    xray run examples.lessons.07_plan_for_gpus:plan_for_gpus      # here: two cores will do

`parallel: auto` has a run take what the planner chooses for the machines that are there; `xray run … --explain` and
each stage's record show it. Change next: `model=` to yours, `trainable_layers` to None, then plan again.
"""

from __future__ import annotations

import re
from typing import Any

from prefect import flow

import xray

KIND = re.compile(
    r"\b(amazing|awesome|beautiful|best|cool|enjoy|excited|favorite|fun|glad|good|great|happy|hope|interesting|"
    r"like|love|lovely|nice|perfect|thanks?|welcome|wonderful)\b",
    re.IGNORECASE,
)
UNKIND = re.compile(r"\b(afraid|bad|boring|hate|no|not|nothing|sad|sorry|\w+n't)\b", re.IGNORECASE)


def kind(prompts: list[str], replies: list[str]) -> list[float]:
    """1 where a reply says something kind and nothing that is not."""
    return [float(bool(KIND.search(reply)) and not UNKIND.search(reply)) for reply in replies]


@flow(task_runner=xray.task_runner(), persist_result=False)
def plan_for_gpus(output: str = "runs/plan-for-gpus", seed: int = 0, iterations: int = 12) -> None:
    """SFT on short human replies, GRPO, and an evaluation by a judge that was not trained against."""
    top: dict[str, Any] = {"trainable_layers": 2, "engine": {"precision": "bfloat16", "micro_batch_tokens": 2048}}
    groups: dict[str, Any] = {"iterations": iterations, "prompts_per_iteration": 8, "minibatch_size": 32}
    shared: dict[str, Any] = {"gold": "vader", "frozen": {"precision": "bfloat16"}}
    with xray.workspace(output, project="plan-for-gpus", seed=seed, runtime={"parallel": "auto"}, **shared):
        chats = xray.prepare(context_messages=1, max_chars=80, max_prompt_tokens=80)
        base = xray.base(model="smollm2-135m")
        sft = xray.sft(base, data=chats, steps=30, batch_size=32, lr=3e-4, **top)
        policy = xray.ppo(
            sft, prompts=chats, rewards=[kind], method="grpo", lr=3e-4, reward_scaling="none", **groups, **top
        )
        result = xray.evaluate(policy, against=sft, prompts=chats, rewards=[kind], num_prompts=256)
        xray.register(policy, result)
