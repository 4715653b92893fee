"""OpenAI's Chat Completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from xray_runtime.agents.pictures import RequestPictures
from xray_runtime.agents.request import MAX_CHOICES, AgentReply, Request, RequestReader

Event = tuple[str | None, dict[str, Any] | str]
"""Name and data of a server-sent event."""


def read(body: Any, temperature: float, pictures: RequestPictures | None = None) -> Request:
    """The request in a body. Raises ValueError if it is refused."""
    reader = RequestReader(body, temperature, pictures)
    limits = reader.count("max_tokens"), reader.count("max_completion_tokens")
    return reader.checked(
        Request(
            messages=reader.messages(reader.get("messages", list, [])),
            tools=reader.tools(reader.get("tools", list, [])),
            n=reader.count("n", MAX_CHOICES, 1) or 1,
            max_tokens=min(filter(None, limits), default=None),
            stop=reader.stop(),
            calls_tools=reader.calls_tools(reader.get("tool_choice", (str, dict))),
        )
    )


def answer(replies: Sequence[AgentReply]) -> dict[str, Any]:
    """The body of an answer."""
    choices = [
        {"index": number, "message": _message(reply), "finish_reason": reply.finish, "logprobs": None}
        for number, reply in enumerate(replies)
    ]
    head = {"id": f"chatcmpl-{replies[0].id}", "object": "chat.completion", "created": 0, "model": "policy"}
    return head | {"choices": choices, "usage": usage(replies)}


def events(whole: dict[str, Any]) -> Iterator[Event]:
    """An answer as a stream: each choice's role, text, calls and end, then the usage."""
    head = whole | {"object": "chat.completion.chunk", "usage": None}
    for choice in whole["choices"]:
        message = choice["message"]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": message["content"] or ""}]
        deltas += [{"tool_calls": [call | {"index": n}]} for n, call in enumerate(message.get("tool_calls", []))]
        for delta in deltas:
            yield None, head | {"choices": [{"index": choice["index"], "delta": delta, "finish_reason": None}]}
        end = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        yield None, head | {"choices": [end]}
    yield None, head | {"choices": [], "usage": whole["usage"]}
    yield None, "[DONE]"


def usage(replies: Sequence[AgentReply]) -> dict[str, int]:
    """Numbers of tokens."""
    prompt, sampled = replies[0].num_prompt, sum(reply.num_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _message(reply: AgentReply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["content"] = reply.text or None
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
            }
            for call in reply.calls
        ]
    return message
