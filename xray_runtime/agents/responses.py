"""OpenAI's Responses: `POST /v1/responses`. Answers are not stored, so `previous_response_id` is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from xray_runtime.agents.chat import Event
from xray_runtime.agents.pictures import RequestPictures
from xray_runtime.agents.request import AgentReply, RefusedError, Request, RequestReader, has_pictures, text_of
from xray_runtime.kernel.errors import shown

TEXTS = ("input_text", "output_text", "text")


def read(body: Any, temperature: float, pictures: RequestPictures | None = None) -> Request:
    """The request in a body. Raises ValueError if it is refused."""
    reader = RequestReader(body, temperature, pictures)
    given = reader.get("input", (str, list), [])
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    instructions = reader.get("instructions", str)
    first = [{"role": "system", "content": instructions}] if instructions else []
    return reader.checked(
        Request(
            messages=reader.messages([*first, *_messages(items)], "input"),
            tools=reader.tools([_tool(tool) for tool in reader.get("tools", list, [])]),
            max_tokens=reader.count("max_output_tokens"),
            calls_tools=reader.calls_tools(reader.get("tool_choice", (str, dict))),
        )
    )


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise RefusedError(f"tools has {shown(tool)}, which is not supported; allowed: functions")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _messages(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Items as messages; an assistant's text and the calls after it are one message, as they were one reply."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
        last_is_own = bool(messages) and messages[-1]["role"] == "assistant"
        if kind == "message":
            content = item.get("content")
            text = content if has_pictures(content) else text_of("input", content, TEXTS)
            messages.append({"role": item.get("role"), "content": text})
        elif kind == "function_call":
            if not last_is_own:
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = text_of("input", item.get("output"), TEXTS)
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": content})
        elif kind != "reasoning":
            raise RefusedError(f"input has an item of type {kind!r}, which is not supported")
    return messages


def answer(replies: Sequence[AgentReply]) -> dict[str, Any]:
    """The body of an answer."""
    [reply] = replies
    output: list[dict[str, Any]] = []
    if reply.text or not reply.calls:
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "status": "completed"}
        output.append(message | {"content": [part]})
    for call in reply.calls:
        arguments = json.dumps(call["arguments"], ensure_ascii=False)
        named = {"call_id": call["id"], "name": call["name"], "arguments": arguments}
        output.append({"type": "function_call", "id": f"fc_{call['id']}", "status": "completed", **named})
    is_cut = reply.finish == "length"
    usage = {
        "input_tokens": reply.num_prompt,
        "output_tokens": reply.num_tokens,
        "total_tokens": reply.num_prompt + reply.num_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": 0,
        "model": "policy",
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage,
    }


def events(whole: dict[str, Any]) -> Iterator[Event]:
    """An answer as a stream."""
    for number, (kind, data) in enumerate(_events(whole)):
        yield kind, {"type": kind, "sequence_number": number, **data}


def _events(whole: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for number, item in enumerate(whole["output"]):
        at = {"output_index": number}
        of_item = at | {"item_id": item["id"]}
        if item["type"] == "message":
            yield "response.output_item.added", at | {"item": item | {"status": "in_progress", "content": []}}
            [part] = item["content"]
            of_part = of_item | {"content_index": 0}
            yield "response.content_part.added", of_part | {"part": part | {"text": ""}}
            yield "response.output_text.delta", of_part | {"delta": part["text"], "logprobs": []}
            yield "response.output_text.done", of_part | {"text": part["text"], "logprobs": []}
            yield "response.content_part.done", of_part | {"part": part}
        else:
            yield "response.output_item.added", at | {"item": item | {"status": "in_progress", "arguments": ""}}
            yield "response.function_call_arguments.delta", of_item | {"delta": item["arguments"]}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", of_item | done
        yield "response.output_item.done", at | {"item": item}
    yield f"response.{whole['status']}", {"response": whole}
