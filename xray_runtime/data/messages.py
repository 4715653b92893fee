"""Messages from the forms of common files into X-ray's form.

Forms: OpenAI's `{"role", "content"}`, with text or text parts as content and the role `developer` read as `system`;
ShareGPT's `{"from", "value"}`. Assistant messages may have `tool_calls`. Texts are never changed.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from xray_runtime.data.pairs import Messages
from xray_runtime.data.reasoning import KEY

ROLES = ("system", "user", "assistant", "tool")
ASKING = ("user", "tool")
"""Roles that precede an assistant's reply."""
SAME_ROLE = {
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Other names of the roles: OpenAI's newer one, and ShareGPT's."""
CALLS = "function_call"
"""ShareGPT's role for a message that is the JSON of a call."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""OpenAI's types of content parts that are text."""


def read_messages(where: object, column: str, value: Any) -> Messages:
    """A column of messages. Raises ValueError: one line that begins with `where`."""
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise ValueError(f"{where}: {column} must be a list of messages, not {found}")
    return [_message(where, column, message) for message in value]


def checked_text(where: object, column: str, value: str) -> str:
    """`value` unchanged. Raises ValueError if it is not valid Unicode text."""
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError as error:
        lone = ord(value[error.start])
        raise ValueError(f"{where}: {column} has a lone surrogate (U+{lone:04X}), which is not valid text") from None
    return value


def read_tools(where: object, record: dict[str, Any]) -> list[dict[str, Any]]:
    """The column `tools` of a record: JSON schemas of the available tools."""
    value = record.get("tools") or []
    if isinstance(value, str):
        value = _parsed(value, f"{where}: tools is a text that is")
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError(f"{where}: tools must be a list of JSON schemas, or its JSON text")
    return value


def _message(where: object, column: str, value: Any) -> dict[str, Any]:
    given = {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else {}
    if "from" in given and "role" not in given:
        given = _from_sharegpt(where, column, given)
    calls = given.get("tool_calls") or []
    content = given.get("content", "" if calls else None)
    if isinstance(content, list):
        content = _joined(where, column, content)
    if not isinstance(content, str):
        raise ValueError(f"{where}: {column} must hold objects with role and content, both strings")
    role = given.get("role")
    role = SAME_ROLE.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise ValueError(f"{where}: {column} has role {role!r}; allowed: {', '.join(ROLES)}, developer")
    if "function_call" in given:
        raise ValueError(f"{where}: {column} has function_call, OpenAI's old form of a call; tool_calls is expected")
    message = {"role": role, "content": checked_text(where, column, content)}
    if calls:
        if role != "assistant":
            raise ValueError(f"{where}: {column} has tool_calls of role {role!r}; allowed: assistant")
        message["tool_calls"] = _tool_calls(where, column, calls)
    if role == "assistant" and isinstance(given.get(KEY), str) and given[KEY]:
        message[KEY] = checked_text(where, column, given[KEY])
    if role == "tool":
        message |= {
            name: checked_text(where, column, str(given[name])) for name in ("name", "tool_call_id") if name in given
        }
    return message


def _from_sharegpt(where: object, column: str, given: dict[str, Any]) -> dict[str, Any]:
    role, text = given["from"], given.get("value")
    if role != CALLS:
        return {"role": role, "content": text}
    calls = _parsed(text if isinstance(text, str) else "", f"{where}: {column} has a {CALLS} that is")
    return {"role": "assistant", "tool_calls": calls}


def _parsed(text: str, what: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{what} not JSON ({error})") from error


def _joined(where: object, column: str, parts: list[Any]) -> str:
    """The text of OpenAI's content parts, one line each, as vLLM's server joins them for templates of plain text."""
    found = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if kind in TEXT_PARTS else None
        if not isinstance(text, str):
            raise ValueError(
                f"{where}: {column} has a content part of type {kind!r}, which is not supported; allowed: text; "
                "remove such rows"
            )
        found.append(text)
    return "\n".join(found)


def _tool_calls(where: object, column: str, calls: Any) -> list[dict[str, Any]]:
    """The calls, with arguments as objects, which templates write as JSON."""
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}: {column} must hold tool_calls with a function's name and arguments")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _parsed(arguments or "{}", f"{where}: {column} has a tool call whose arguments are")
        if not isinstance(arguments, dict):
            raise ValueError(f"{where}: {column} has a tool call whose arguments are not a JSON object: {arguments!r}")
        about = call if "function" in call else {}
        found.append(about | {"type": "function", "function": function | {"arguments": arguments}})
    checked_text(where, column, json.dumps(found, ensure_ascii=False))
    return found
