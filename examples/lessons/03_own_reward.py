"""Lesson 3: a reward of your own. A function of prompts and replies, and its source is in the key of what it judges.

Rejection sampling: each round keeps the best of several replies to each prompt by the reward, and SFT learns from them
(RAFT, Dong et al. 2023). A prompt of which no reply passes is skipped, and counted.

    xray run examples.lessons.03_own_reward:own_reward

Change next: edit `asks` and run again (the first SFT is kept, what follows is computed); or put
`xray.ppo(sft, prompts=chats, rewards=[asks])` in the place of the loop.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

import xray


def asks(prompts: list[str], replies: list[str]) -> list[float]:
    """1 where a reply asks something back."""
    return [float(reply.rstrip().endswith("?")) for reply in replies]


@flow(task_runner=xray.task_runner(), persist_result=False)
def own_reward(
    output: str = "runs/own-reward", seed: int = 0, steps: int = 120, rounds: int = 2, num_prompts: int = 192
) -> None:
    """A small model of human conversations learns to ask back.

    Args:
        steps: of the first SFT.
        rounds: of sampling and learning.
        num_prompts: asked in each round, and in the evaluation.
    """
    sampling: dict[str, Any] = {"num_prompts": num_prompts, "max_new_tokens": 24}
    with xray.workspace(output, project="own-reward", seed=seed):
        chats = xray.prepare(source="chitchat", context_messages=1, max_chars=60, max_conversations=1500)
        base = xray.fresh_base(chats, vocab_size=1024, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2)
        sft = xray.sft(base, data=chats, steps=steps, lr=4e-3)
        policy = sft
        for number in range(1, rounds + 1):
            kept = xray.best_of_n(
                policy, chats, rewards=[asks], min_reward=1.0, samples=8, name=f"best-{number}", **sampling
            )
            policy = xray.sft(policy, data=kept, steps=40, batch_size=32, lr=1e-3, name=f"sft-{number}")
        result = xray.evaluate(policy, against=sft, prompts=chats, rewards=[asks], **sampling)
        xray.register(policy, result)
