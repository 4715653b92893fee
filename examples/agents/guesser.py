"""An agent that knows nothing of training: it asks OpenAI's client for the largest of some digits, at most twice."""

from __future__ import annotations

from typing import Any

import openai


def play(task: dict[str, Any]) -> float:
    """1 for a right answer, half of it for a second one."""
    client = openai.OpenAI()  # address and key are in the environment
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    for reward in (1.0, 0.5):
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
        if answer == task["answer"]:
            return reward
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "no"}]
    return 0.0
