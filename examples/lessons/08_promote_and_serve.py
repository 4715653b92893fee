"""Lesson 8: promote and serve. What a run registers is a candidate; gates and a person make it the champion.

The graph is `configs/quickstart.yaml` in Python: the whole lifecycle, from data to a registered policy.

    xray run examples.lessons.08_promote_and_serve:promote_and_serve
    xray promote --output runs/served --name served-policy --by NAME --note REASON
    xray serve --output runs/served                          # the champion, OpenAI-compatible, on port 8000
    xray lineage served-policy --output runs/served          # what it came from

Change next: `min_win_rate` to 0.95, and see the promotion refused; or run another seed into the same directory and
promote again, which holds the candidate against the champion.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

import xray


@flow(task_runner=xray.task_runner(), persist_result=False)
def promote_and_serve(output: str = "runs/served", seed: int = 0) -> None:
    """Data → SFT → reward model → two PPO stages → evaluation → registration."""
    with xray.workspace(output, project="served", seed=seed, gold="vader", gates={"min_win_rate": 0.6}):
        chats = xray.prepare(source="chitchat", context_messages=1, min_chars=2, max_chars=60, max_prompt_tokens=32)
        heads: dict[str, Any] = {"num_layers": 4, "num_heads": 5, "num_kv_heads": 5}
        base = xray.fresh_base(
            chats, vocab_size=2048, hidden_size=160, intermediate_size=448, max_positions=128, **heads
        )
        sft = xray.sft(base, data=chats, steps=260, batch_size=64, max_response_tokens=32, lr=4e-3)
        pairs = xray.preferences(
            policy=sft, data=chats, source="gold", num_pairs=2400, max_new_tokens=16, sharpness=5.0
        )
        judge = xray.reward_model(sft, pairs, epochs=3, batch_size=64, lr=2e-3)
        policy = sft
        for number, (lr, coef, target) in enumerate([(4e-4, 0.1, 4.0), (2e-4, 0.15, 6.0)], start=1):
            policy = xray.ppo(
                policy,
                prompts=chats,
                reference=sft,
                rewards=[judge],
                iterations=14,
                lr=lr,
                truncated="penalize",
                truncation_penalty=0.5,
                kl={"controller": "adaptive", "coef": coef, "target": target, "horizon": 300},
                name=f"ppo-{number}",
            )
        result = xray.evaluate(policy, against=sft, prompts=chats, rewards=[judge], num_prompts=256, max_new_tokens=16)
        xray.register(policy, result)
