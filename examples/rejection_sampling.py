"""Rejection sampling, iterated: each round keeps the best of several replies to each prompt, and SFT learns from them.

RAFT (Dong et al. 2023), with a reward that passes or does not: a prompt of which no reply passes is skipped, and
counted. All of it is made of stage kinds that exist: `best_of_n` and `sft`.

    xray run examples.rejection_sampling:rejection_sampling
"""

from __future__ import annotations

from prefect import flow

import xray


def asks(prompts: list[str], replies: list[str]) -> list[float]:
    """1 where a reply asks something back."""
    return [float(reply.rstrip().endswith("?")) for reply in replies]


@flow(task_runner=xray.task_runner(), persist_result=False)
def rejection_sampling(
    output: str = "runs/rejection-sampling", seed: int = 0, steps: int = 120, rounds: int = 2, num_prompts: int = 192
) -> None:
    """A small model of human conversations learns to ask back.

    Args:
        steps: of the first SFT.
        rounds: of sampling and learning.
        num_prompts: asked in each round, and in the evaluation.
    """
    with xray.workspace(output, project="rejection-sampling", seed=seed):
        chats = xray.prepare(source="chitchat", context_messages=1, max_chars=60, max_conversations=1500)
        base = xray.fresh_base(chats, vocab_size=1024, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2)
        sft = xray.sft(base, data=chats, steps=steps, lr=4e-3)
        policy = sft
        for number in range(1, rounds + 1):
            kept = xray.best_of_n(
                policy,
                chats,
                rewards=[asks],
                min_reward=1.0,
                num_prompts=num_prompts,
                samples=8,
                max_new_tokens=24,
                name=f"best-{number}",
            )
            policy = xray.sft(policy, data=kept, steps=40, batch_size=32, lr=1e-3, name=f"sft-{number}")
        result = xray.evaluate(
            policy, against=sft, prompts=chats, rewards=[asks], num_prompts=num_prompts, max_new_tokens=24
        )
        xray.register(policy, result)


if __name__ == "__main__":
    rejection_sampling()
