"""An environment of `verifiers`: its task scores the conversation, its harness asks twice."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import openai
import verifiers.v1 as vf
from agent_main import right, run

__all__ = ["TwoTries"]


class Digits(vf.TaskData):
    answer: str


class LargestDigit(vf.Task[Digits]):
    @vf.reward
    async def by_try(self, trace: vf.Trace) -> float:
        """1 for a right answer, half of it for a second one."""
        said = [message.content for message in trace.branches[-1].messages if message.role == "assistant"]
        return float(right({"answer": self.data.answer}, said[-1])) / len(said)


class TwoTries(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                completion = await client.chat.completions.create(model=ctx.model, messages=messages)
                answer = completion.choices[0].message.content
                if right({"answer": data.answer}, answer):
                    break
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "no"}]
        return vf.ProgramResult(0, "", "")


def play(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """The environment's reward of one episode."""
    # verifiers takes a key from a variable only; each episode has a key of its own.
    os.environ[api_key] = api_key
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=api_key)
    about: Any = {"model": "policy", "client": client, "harness": {"id": "verifiers_env"}}
    config = vf.AgentConfig(**about, runtime=vf.SubprocessConfig())
    data = Digits(idx=0, prompt=task["prompt"], answer=task["answer"])
    trace = asyncio.run(vf.Agent(config).run(LargestDigit(data)))
    assert trace.ok, trace.errors
    return float(trace.reward)


if __name__ == "__main__":
    run(play)
