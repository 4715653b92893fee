"""The quickstart's lifecycle, written out as a graph: what `xray run configs/quickstart.yaml` does, in Python.

xray run examples.lifecycle_as_code:lifecycle
"""

from __future__ import annotations

from prefect import flow

import xray


@flow(task_runner=xray.task_runner(), persist_result=False)
def lifecycle(output: str = "runs/lifecycle-as-code", seed: int = 0, small: bool = False) -> None:
    """Data → SFT → reward model → two PPO stages → evaluation → registration.

    Args:
        small: a minute's worth of it, to see that it works.
    """
    conversations, sft_steps, pairs, iterations, prompts = (400, 8, 48, 2, 16) if small else (3000, 400, 3000, 20, 256)
    with xray.workspace(output, project="lifecycle-as-code", seed=seed, gold="vader"):
        chats = xray.prepare(source="chitchat", context_messages=1, max_chars=120, max_conversations=conversations)
        base = xray.fresh_base(chats)
        sft = xray.sft(base, data=chats, steps=sft_steps)
        labelled = xray.preferences(policy=sft, data=chats, source="gold", num_pairs=pairs)
        judge = xray.reward_model(sft, labelled)
        policy = sft
        for number in (1, 2):
            policy = xray.ppo(
                policy, prompts=chats, reference=sft, rewards=[judge], iterations=iterations, name=f"ppo-{number}"
            )
        result = xray.evaluate(policy, against=sft, prompts=chats, rewards=[judge], num_prompts=prompts)
        xray.register(policy, result)


if __name__ == "__main__":
    lifecycle()
