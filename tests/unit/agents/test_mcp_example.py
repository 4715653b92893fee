"""The example whose tools are those of an MCP server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.agents.parts import World

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}\n</tool_call>'


def test_a_tool_of_a_server_in_a_process_of_its_own_answers_the_policy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.agents import mcp_tools  # the library takes a second, of this worker alone

    said = iter([CALL, "42"])
    world.generator.text = lambda seed: next(said)
    episode = world.open()
    monkeypatch.setenv("OPENAI_BASE_URL", f"{world.gateway.url(episode)}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", episode.secret)
    task: dict[str, Any] = {"prompt": "2 + 40", "answer": "42"}
    assert asyncio.run(mcp_tools.play(task)) == 1.0
    first, second = sorted(episode.calls(), key=lambda call: len(call.tokens))
    assert second.parent == first.key
    read = world.tokenizer.decode(second.prompt[len(first.tokens) :])
    assert "42" in read
