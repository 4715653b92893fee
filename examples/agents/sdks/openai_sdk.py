"""An agent with OpenAI's SDK: two tries to name the largest digit."""

from __future__ import annotations

from typing import Any

import openai
from agent_main import right, run


def play(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """1 for a right answer, half of it for a second one."""
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        for reward in (1.0, 0.5):
            answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
            if right(task, answer):
                return reward
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "no"}]
    return 0.0


if __name__ == "__main__":
    run(play)
