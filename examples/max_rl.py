"""An algorithm of your own in one file: MaxRL, on short questions.

MaxRL (Tajwar et al. 2026, "Maximum likelihood reinforcement learning") divides a reply's advantage over its group by
the group's mean reward, where GRPO divides by its deviation: a prompt that is rarely solved counts for more, as it does
in the likelihood of a right answer. It is made for rewards of 0 or 1.

    xray run examples.max_rl:max_rl_lifecycle
    python -m examples.max_rl

Three minutes on two cores; the share of short questions among the replies goes from 0 to between 0.1 and 0.2.
`tests/unit/algorithms/test_checking.py` tries it on closed forms.
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


MAX_RL: dict[str, Any] = {
    "advantages": max_rl,
    "samples_per_prompt": 8,
    "epochs": 1,
    "dual_clip": None,
    "whiten_advantages": False,
    "reward_scaling": "none",
    "kl": {"controller": "fixed", "coef": 0.0},
}
"""The paper's settings: no critic, no KL, rewards as they are."""


def short_question(prompts: list[str], replies: list[str]) -> list[float]:
    """1 where a reply is a question of at most 40 characters."""
    return [float(len(reply) <= 40 and reply.strip().endswith("?")) for reply in replies]


@flow(task_runner=xray.task_runner(), persist_result=False)
def max_rl_lifecycle(output: str = "runs/max-rl", seed: int = 0, iterations: int = 60) -> None:
    """A policy that learns to answer with short questions."""
    with xray.workspace(output, project="max-rl", seed=seed):
        chats = xray.prepare(source="chitchat", context_messages=1, max_chars=120, max_conversations=600)
        base = xray.fresh_base(chats, vocab_size=512, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2)
        sft = xray.sft(base, data=chats, steps=60)
        policy = xray.ppo(
            sft,
            prompts=chats,
            rewards=[short_question],
            iterations=iterations,
            prompts_per_iteration=16,
            minibatch_size=64,
            **MAX_RL,
        )
        xray.evaluate(policy, against=sft, prompts=chats, num_prompts=64)


if __name__ == "__main__":
    max_rl_lifecycle()
