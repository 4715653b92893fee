"""One request and its answer, as a replica saw them, and the texts in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

DONE = b"[DONE]"


@dataclass(frozen=True)
class Exchange:
    """A request that may be recorded; the bytes are those on the wire."""

    id: str
    at_ms: int
    """Milliseconds since 1970 when the request came."""
    route: str
    model: str
    """sha256 of the model that answered."""
    user: str
    """By the request's header; empty: the request's field `user` counts."""
    application: str
    request: bytes
    answer: bytes
    streamed: bool
    complete: bool
    latency_s: float
    first_s: float
    prompt_tokens: int
    reply_tokens: int
    canary: str = ""
    """As in `kernel.history.recorded_rows.RecordedRow`."""

    @property
    def size(self) -> int:
        return len(self.request) + len(self.answer)


def texts_of(exchange: Exchange) -> dict[str, Any]:
    """`{"request": …, "answer": …}`: the request as it came; choices or output of the answer, and its `usage`.

    A streamed answer is assembled as if it had not been streamed. Raises ValueError if either is not JSON.
    """
    request = json.loads(exchange.request)
    if not isinstance(request, dict):
        raise ValueError("the request is not an object")
    if not exchange.streamed:
        return {"request": request, "answer": _content(json.loads(exchange.answer))}
    events = list(_events(exchange.answer))
    if exchange.route == "/v1/responses":
        return {"request": request, "answer": _responses(events)}
    return {"request": request, "answer": {"choices": _choices(events)}}


def _content(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: answer[name] for name in ("choices", "output", "usage") if name in answer}


def _events(stream: bytes) -> Iterator[dict[str, Any]]:
    """The data of server-sent events; one that was cut off is left out."""
    for line in stream.split(b"\n\n")[:-1]:
        data = line.removeprefix(b"event: ").partition(b"data: ")[2].strip()
        if data and data != DONE:
            yield json.loads(data)


def _responses(events: list[dict[str, Any]]) -> dict[str, Any]:
    for event in reversed(events):
        if event.get("type") in ("response.completed", "response.incomplete"):
            return _content(event["response"])
    text = "".join(str(e["delta"]) for e in events if e.get("type") == "response.output_text.delta")
    return {"output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]}


def _choices(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a chat or a completion, from its chunks."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event.get("choices", ()):
            choice = choices.setdefault(part["index"], {"index": part["index"], "finish_reason": None})
            choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
            if "text" in part:
                choice["text"] = choice.get("text", "") + part["text"]
            if "delta" in part:
                _extend(choice.setdefault("message", {"role": "assistant", "content": None}), part["delta"])
    return [choices[index] for index in sorted(choices)]


def _extend(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for part in value or ():
                while len(calls) <= part["index"]:
                    calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
                call, function = calls[part["index"]], part.get("function") or {}
                call |= {key: part[key] for key in ("id", "type") if part.get(key)}
                call["function"]["name"] += function.get("name") or ""
                call["function"]["arguments"] += function.get("arguments") or ""
        elif name != "role" and isinstance(value, str):
            message[name] = (message.get(name) or "") + value
