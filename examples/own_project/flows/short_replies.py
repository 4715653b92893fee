"""A flow of one's own, in a project that has `flows/` and `tasks/` packages of its own.

cd examples/own_project
xray run flows.short_replies:short_replies
"""

from __future__ import annotations

from prefect import flow
from tasks.keep_shortest import keep_shortest

import xray


@flow(task_runner=xray.task_runner(), persist_result=False)
def short_replies(output: str = "runs/short-replies", seed: int = 0, steps: int = 8) -> None:
    """SFT on short replies alone, held against SFT on all of them."""
    with xray.workspace(output, project="short-replies", seed=seed):
        chats = xray.prepare(source="chitchat", context_messages=1, max_chars=120, max_conversations=300)
        base = xray.fresh_base(chats, vocab_size=512, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2)
        everything = xray.sft(base, data=chats, steps=steps, name="sft-all")
        short = xray.sft(base, data=keep_shortest(chats, share=0.3), steps=steps, name="sft-short")
        xray.evaluate(short, against=everything, prompts=chats, gold="vader", num_prompts=16)
