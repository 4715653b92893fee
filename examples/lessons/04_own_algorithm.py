"""Lesson 4: an algorithm of your own. `advantages=` takes a function over tensors, and so does `loss=`.

MaxRL (Tajwar et al. 2026, "Maximum likelihood reinforcement learning") divides a reply's advantage over its group by
the group's mean reward, where GRPO divides by its deviation: a prompt that is rarely solved counts for more, as it does
in the likelihood of a right answer. It is made for rewards of 0 or 1.

    xray run examples.lessons.04_own_algorithm:own_algorithm

Change next: the formula; `xray.check_advantages(max_rl)` in a test says whether it depends on what it must not
(`tests/unit/algorithms/test_checking.py`). A loss of your own: docs/methods.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect import flow

import xray

if TYPE_CHECKING:
    from torch import Tensor


def max_rl(rollout: xray.AdvantageInputs) -> Tensor:
    """(r − μ) / μ over each group [B]; a group without any reward teaches nothing: 0."""
    rewards, groups = rollout.scores.double(), rollout.groups
    size = int(groups.max()) + 1
    sums = rewards.new_zeros(size).index_add(0, groups, rewards)
    means = (sums / groups.bincount(minlength=size))[groups]
    return ((rewards - means) / means.clamp(min=1e-12)).where(means > 0, 0.0)


def short_question(prompts: list[str], replies: list[str]) -> list[float]:
    """1 where a reply is a question of at most 40 characters."""
    return [float(len(reply) <= 40 and reply.strip().endswith("?")) for reply in replies]


@flow(task_runner=xray.task_runner(), persist_result=False)
def own_algorithm(output: str = "runs/own-algorithm", seed: int = 0, iterations: int = 60) -> None:
    """A policy that learns to answer with short questions, with the paper's settings: no critic, no KL."""
    with xray.workspace(output, project="own-algorithm", seed=seed):
        chats = xray.prepare(source="chitchat", context_messages=1, max_chars=120, max_conversations=600)
        base = xray.fresh_base(chats, vocab_size=512, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2)
        sft = xray.sft(base, data=chats, steps=60)
        groups: dict[str, Any] = {"prompts_per_iteration": 16, "samples_per_prompt": 8, "minibatch_size": 64}
        as_they_are: dict[str, Any] = {"dual_clip": None, "whiten_advantages": False, "reward_scaling": "none"}
        policy = xray.ppo(
            sft,
            prompts=chats,
            rewards=[short_question],
            advantages=max_rl,
            iterations=iterations,
            epochs=1,
            kl={"controller": "fixed", "coef": 0.0},
            **groups,
            **as_they_are,
        )
        xray.evaluate(policy, against=sft, prompts=chats, rewards=[short_question], num_prompts=256)
