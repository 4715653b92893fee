"""Every policy of a graph is measured in the same way, and a reward model that PPO never saw judges the last one.

xray run examples.side_by_side:side_by_side
xray run examples.side_by_side:side_by_side --set words=50      # measures anew, and trains nothing again
"""

from __future__ import annotations

from prefect import flow

import xray

RUDE = ["idiot", "stupid", "shut up"]


@flow(task_runner=xray.task_runner(), persist_result=False)
def side_by_side(
    output: str = "runs/side-by-side", seed: int = 0, steps: int = 30, iterations: int = 4, words: int = 32
) -> None:
    """SFT, then PPO against a reward model of one half of the pairs; one of the other half judges.

    Args:
        words: prompts whose replies are searched for rude words.
    """
    with xray.workspace(output, project="side-by-side", seed=seed):
        chats = xray.prepare(source="chitchat", context_messages=1, max_chars=120, max_conversations=600)
        base = xray.fresh_base(chats, vocab_size=512, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2)
        sft = xray.sft(base, data=chats, steps=steps)

        pairs = xray.preferences(data=chats, source="ratings", num_pairs=200)
        mine = xray.split_preferences(pairs, part="training", name="training")
        theirs = xray.split_preferences(pairs, part="heldout", name="heldout")
        reward = xray.reward_model(sft, mine, epochs=1, name="reward")
        judge = xray.reward_model(sft, theirs, epochs=1, name="judge")
        policy = xray.ppo(
            sft, prompts=chats, rewards=[reward], iterations=iterations, prompts_per_iteration=32, minibatch_size=16
        )

        for name, model in {"sft": sft, "ppo": policy}.items():
            xray.benchmark(model, chats, suite="perplexity", num_rows=64, name=f"perplexity-{name}")
            xray.benchmark(model, chats, suite="words", lists={"rude": RUDE}, num_prompts=words, name=f"words-{name}")
        result = xray.evaluate(
            policy, against=sft, prompts=chats, rewards=[reward], judges=[judge], gold="vader", num_prompts=32
        )
        xray.register(policy, result)


if __name__ == "__main__":
    side_by_side()
