"""A chat with a served model: its text and its calls of tools come as lines of JSON while the model writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from xray.studio.access import Fields
from xray.studio.studio import Link, Pages, Studio, page, studio_of
from xray_runtime.kernel.config.validation import ConfigError

router = APIRouter()
PAGES = Pages(router, (Link("/chat", "Chat", 80, lambda studio: studio.serve is not None),))

SECONDS = 600.0
MAX_MESSAGES = 200
EXAMPLE = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


@router.get("/chat")
def chat_page(request: Request) -> Response:
    serve = studio_of(request).serve
    if serve is None:
        raise ConfigError("--serve: is required for a chat: the address of a model that `xray serve` serves")
    return page(request, "chat.html", serve=serve, example=json.dumps(EXAMPLE))


@router.post("/chat")
def chat(request: Request, fields: Fields) -> Response:
    """The reply to a conversation. Each line has one of `reasoning`, `text`, `calls` (at the end) and `error`."""
    studio = studio_of(request)
    if studio.serve is None:
        raise ConfigError("--serve: is required for a chat")
    content: dict[str, Any] = {"messages": _list(fields, "messages"), "stream": True}
    if len(content["messages"]) > MAX_MESSAGES:
        raise ConfigError(f"messages: {len(content['messages'])} are not allowed: must be at most {MAX_MESSAGES}")
    if fields.get("tools", "").strip():
        content["tools"] = _list(fields, "tools")
    given = fields.get("temperature", "1")
    try:
        content["temperature"] = float(given)
    except ValueError:
        content["temperature"] = -1.0
    if not 0 <= content["temperature"] <= 2:
        raise ConfigError(f"temperature: {given!r} is not allowed: must be a number from 0 to 2")
    lines = (json.dumps(part) + "\n" for part in _reply(studio, content))
    return StreamingResponse(lines, media_type="application/x-ndjson")


def _list(fields: dict[str, str], name: str) -> list[Any]:
    try:
        parsed = json.loads(fields.get(name, ""))
    except ValueError:
        parsed = None
    if not isinstance(parsed, list):
        raise ConfigError(f"{name}: {fields.get(name, '')[:80]!r} is not allowed: must be a JSON list")
    return parsed


def _reply(studio: Studio, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    headers = {"authorization": f"Bearer {studio.serve_key}"} if studio.serve_key else {}
    calls: dict[int, dict[str, Any]] = {}
    try:
        with httpx.Client(base_url=str(studio.serve), headers=headers, timeout=SECONDS) as client:
            [model, *_] = client.get("/v1/models").raise_for_status().json()["data"]
            with client.stream("POST", "/v1/chat/completions", json={"model": model["id"], **content}) as reply:
                if reply.status_code != 200:
                    yield {"error": f"refused: {reply.read().decode('utf-8', 'replace')[:500]}"}
                    return
                for delta in _deltas(reply.iter_lines()):
                    if delta.get("reasoning"):
                        yield {"reasoning": delta["reasoning"]}
                    if delta.get("content"):
                        yield {"text": delta["content"]}
                    for piece in delta.get("tool_calls") or ():
                        _add(calls, piece)
        if calls:
            yield {"calls": [calls[index] for index in sorted(calls)]}
    except (httpx.HTTPError, ValueError, KeyError) as error:
        yield {"error": f"{studio.serve} does not answer: {type(error).__name__}"}


def _deltas(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        data = line.removeprefix("data: ")
        if line.startswith("data: ") and data != "[DONE]":
            for choice in json.loads(data).get("choices", ()):
                yield choice.get("delta", {})


def _add(calls: dict[int, dict[str, Any]], piece: dict[str, Any]) -> None:
    """Add a piece of a call: the first has its id and name, each some of its arguments."""
    call = calls.setdefault(
        piece.get("index", 0), {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
    )
    call["id"] = call["id"] or piece.get("id") or ""
    function = piece.get("function") or {}
    for name in ("name", "arguments"):
        call["function"][name] += function.get(name) or ""
