"""Online DPO: each round samples pairs from the policy as it is, a reward orders them, and DPO learns from them.

Guo et al. 2024, "Direct language model alignment from online AI feedback", with rounds in place of steps. All of it is
made of stage kinds that exist: `preferences` (source `rewards`) and `dpo`.

    xray run examples.online_dpo:online_dpo
"""

from __future__ import annotations

from prefect import flow

import xray


def asks(prompts: list[str], replies: list[str]) -> list[float]:
    """1 where a reply asks something back."""
    return [float(reply.rstrip().endswith("?")) for reply in replies]


@flow(task_runner=xray.task_runner(), persist_result=False)
def online_dpo(
    output: str = "runs/online-dpo", seed: int = 0, steps: int = 120, rounds: int = 2, num_prompts: int = 192
) -> None:
    """A small model of human conversations learns to ask back.

    Args:
        steps: of SFT.
        rounds: of sampling and learning.
        num_prompts: asked in each round, and in the evaluation.
    """
    with xray.workspace(output, project="online-dpo", seed=seed):
        chats = xray.prepare(source="chitchat", context_messages=1, max_chars=60, max_conversations=1500)
        base = xray.fresh_base(chats, vocab_size=1024, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2)
        sft = xray.sft(base, data=chats, steps=steps, lr=4e-3)
        policy = sft
        for number in range(1, rounds + 1):
            pairs = xray.preferences(
                policy=policy,
                data=chats,
                source="rewards",
                rewards=[asks],
                num_prompts=num_prompts,
                samples=8,
                max_new_tokens=24,
                name=f"pairs-{number}",
            )
            # On so few pairs more epochs, or a smaller beta, move the policy so far that its replies fall apart.
            policy = xray.dpo(
                policy, pairs, reference=sft, epochs=2, batch_size=16, lr=1e-3, beta=0.5, name=f"dpo-{number}"
            )
        result = xray.evaluate(
            policy, against=sft, prompts=chats, rewards=[asks], num_prompts=num_prompts, max_new_tokens=24
        )
        xray.register(policy, result)


if __name__ == "__main__":
    online_dpo()
