"""Two reward models and a function judge one policy.

Both reward models need the SFT model alone, so they train at the same time. Run it either way:

    xray run examples.two_judges:two_judges
    python -m examples.two_judges
"""

from __future__ import annotations

from prefect import flow

import xray


def brevity(prompts: list[str], replies: list[str]) -> list[float]:
    """Shorter is better: one score a reply."""
    return [-len(reply) / 100 for reply in replies]


@flow(task_runner=xray.task_runner(), persist_result=False)
def two_judges(output: str = "runs/two-judges", seed: int = 0, steps: int = 120, iterations: int = 20) -> None:
    """One policy, judged by people's ratings of how witty and of how upbeat a conversation was, and by length."""
    with xray.workspace(output, project="two-judges", seed=seed):
        chats = xray.prepare(source="chitchat", context_messages=1, max_chars=120, max_conversations=600)
        base = xray.fresh_base(chats, vocab_size=512, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2)
        sft = xray.sft(base, data=chats, steps=steps)

        judges = []
        for rating in ("upbeat", "interesting"):
            pairs = xray.preferences(data=chats, source="ratings", rating=rating, num_pairs=400, name=f"{rating}-pairs")
            judges.append(xray.reward_model(sft, pairs, epochs=2, name=f"{rating}-judge"))
        upbeat, interesting = judges

        judged = [upbeat, 0.5 * interesting, 0.1 * xray.reward(brevity)]
        policy = xray.ppo(
            sft,
            prompts=chats,
            rewards=judged,
            iterations=iterations,
            prompts_per_iteration=32,
            minibatch_size=16,
        )
        result = xray.evaluate(policy, against=sft, prompts=chats, rewards=judged, gold="vader", num_prompts=128)
        xray.register(policy, result)


if __name__ == "__main__":
    two_judges()
