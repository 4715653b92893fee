"""An agent with Anthropic's SDK: two tries to name the largest digit, streamed."""

from __future__ import annotations

from typing import Any

import anthropic
from agent_main import right, run


def play(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """1 for a right answer, half of it for a second one."""
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    with anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
        for reward in (1.0, 0.5):
            with client.messages.stream(model="policy", max_tokens=100, messages=messages) as stream:
                answer = stream.get_final_message()
            if right(task, answer.content[0].text):
                return reward
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "no"}]
    return 0.0


if __name__ == "__main__":
    run(play)
