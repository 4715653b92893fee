"""An agent with `openai-agents`: two tries to name the largest digit, the second with the first one's history."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from agent_main import right, run
from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled

set_tracing_disabled(True)


async def played(task: dict[str, Any], base_url: str, api_key: str) -> float:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        agent = Agent("guesser", model=OpenAIChatCompletionsModel("policy", openai_client=client))
        history: list[Any] = [{"role": "user", "content": task["prompt"]}]
        for reward in (1.0, 0.5):
            result = await Runner.run(agent, history, max_turns=1)
            if right(task, result.final_output):
                return reward
            history = [*result.to_input_list(), {"role": "user", "content": "no"}]
    return 0.0


def play(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """1 for a right answer, half of it for a second one."""
    return asyncio.run(played(task, base_url, api_key))


if __name__ == "__main__":
    run(play)
