"""Anthropic's Messages: `POST /v1/messages`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from xray_runtime.agents.chat import Event
from xray_runtime.agents.pictures import RequestPictures
from xray_runtime.agents.request import AgentReply, RefusedError, Request, RequestReader, text_of
from xray_runtime.kernel.errors import shown

FINISHES = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
UNREAD = ("thinking", "redacted_thinking")
"""Blocks that the policy never returns."""


def read(body: Any, temperature: float, pictures: RequestPictures | None = None) -> Request:
    """The request in a body. Raises ValueError if it is refused."""
    reader = RequestReader(body, temperature, pictures)
    system = reader.get("system", (str, list))
    first = [{"role": "system", "content": text_of("system", system, ("text",))}] if system else []
    messages = [part for message in reader.get("messages", list, []) for part in _messages(message)]
    return reader.checked(
        Request(
            messages=reader.messages([*first, *messages]),
            tools=reader.tools([_tool(tool) for tool in reader.get("tools", list, [])]),
            max_tokens=reader.count("max_tokens"),
            stop=reader.stop("stop_sequences"),
            calls_tools=reader.calls_tools(reader.get("tool_choice", dict)),
        )
    )


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom" or "name" not in tool:
        raise RefusedError(f"tools has {shown(tool)}, which is not supported; allowed: custom tools with a name")
    function = {"name": tool["name"], "parameters": tool.get("input_schema", {})}
    return {"type": "function", "function": function | {k: tool[k] for k in ("description",) if k in tool}}


def _messages(message: Any) -> Iterator[dict[str, Any]]:
    """A message of text, calls and results of tools as one message each, results first."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        yield message
        return
    parts: list[dict[str, Any]] = []
    calls = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        if kind == "tool_result":
            result = text_of("messages", block.get("content") or "", ("text",))
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": result}
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "image":
            parts.append({"type": "image_url", "image_url": _data_url(block.get("source"))})
        elif kind not in UNREAD:
            parts.append({"type": "text", "text": text_of("messages", [block], ("text",))})
    if parts or calls:
        yield {"role": message.get("role"), "content": parts} | ({"tool_calls": calls} if calls else {})


def _data_url(source: Any) -> str:
    """The picture of an image block, as the other APIs write it."""
    if not isinstance(source, dict) or source.get("type") != "base64":
        kind = source.get("type") if isinstance(source, dict) else type(source).__name__
        raise RefusedError(f"messages has an image whose source is of type {kind!r}; allowed: base64")
    return f"data:{source.get('media_type')};base64,{source.get('data')}"


def answer(replies: Sequence[AgentReply]) -> dict[str, Any]:
    """The body of an answer."""
    [reply] = replies
    blocks: list[dict[str, Any]] = [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
    blocks += [
        {"type": "tool_use", "id": call["id"], "name": call["name"], "input": call["arguments"]} for call in reply.calls
    ]
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": blocks,
        "stop_reason": FINISHES[reply.finish],
        "stop_sequence": None,
        "usage": {"input_tokens": reply.num_prompt, "output_tokens": reply.num_tokens},
    }


def events(whole: dict[str, Any]) -> Iterator[Event]:
    """An answer as a stream."""
    for data in _events(whole):
        yield str(data["type"]), data


def _events(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    begun = whole | {"content": [], "stop_reason": None, "usage": whole["usage"] | {"output_tokens": 0}}
    yield {"type": "message_start", "message": begun}
    for number, block in enumerate(whole["content"]):
        at = {"index": number}
        if block["type"] == "text":
            empty, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            arguments = json.dumps(block["input"], ensure_ascii=False)
            empty, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": arguments}
        yield {"type": "content_block_start", **at, "content_block": empty}
        yield {"type": "content_block_delta", **at, "delta": delta}
        yield {"type": "content_block_stop", **at}
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": end, "usage": {"output_tokens": whole["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}
