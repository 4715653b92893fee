"""An agent whose tools are those of an MCP server, which it starts: this file again.

environment: {agent: "examples.agents.mcp_tools:play"}
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from mcp import Client, StdioServerParameters
from mcp.server import MCPServer

MAX_CALLS = 4

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


async def play(task: dict[str, Any]) -> float:
    """1 if the answer in the end is that of the task."""
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    client = openai.AsyncOpenAI()  # address and key are in the environment
    async with Client(StdioServerParameters(command=sys.executable, args=[__file__])) as tools:
        offered: list[Any] = []
        for tool in (await tools.list_tools()).tools:
            about = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
            offered.append({"type": "function", "function": about})
        for _ in range(MAX_CALLS):
            asked = await client.chat.completions.create(model="policy", messages=messages, tools=offered)
            said: Any = asked.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return float((said.content or "").strip() == task["answer"])
            for call in said.tool_calls:
                found = await tools.call_tool(call.function.name, json.loads(call.function.arguments))
                text = " ".join(part.text for part in found.content if part.type == "text")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    return 0.0


if __name__ == "__main__":
    server.run("stdio")
