"""Lesson 1: a first graph. Calls of stage kinds return handles, and a handle passed on is an edge.

A small model is made from nothing and trained on human conversations; its perplexity is measured before and after.

    xray run examples.lessons.01_first_graph:first_graph
    xray run examples.lessons.01_first_graph:first_graph                      # again: nothing is computed twice
    xray run examples.lessons.01_first_graph:first_graph --set steps=200 --explain

Change next: `lr=` of `xray.sft`, or a second `xray.sft` with other steps beside it (`name=` tells the two apart).
"""

from __future__ import annotations

from prefect import flow

import xray


@flow(task_runner=xray.task_runner(), persist_result=False)
def first_graph(output: str = "runs/first-graph", seed: int = 0, steps: int = 100) -> None:
    """Data → a fresh model → SFT, with both models measured.

    Args:
        steps: of SFT.
    """
    with xray.workspace(output, project="first-graph", seed=seed):
        chats = xray.prepare(source="chitchat", context_messages=1, max_chars=120, max_conversations=600)
        base = xray.fresh_base(chats, vocab_size=512, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2)
        sft = xray.sft(base, data=chats, steps=steps)
        for name, model in {"before": base, "after": sft}.items():
            xray.benchmark(model, chats, suite="perplexity", name=name)
