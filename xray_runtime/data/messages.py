"""Messages from the forms of common files into X-ray's form.

Forms: OpenAI's `{"role", "content"}`, with text or text parts as content and the role `developer` read as `system`;
ShareGPT's `{"from", "value"}`. Assistant messages may have `tool_calls` and `reasoning_content`. Texts are never
changed; a system message without text is none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from xray_runtime.data.pairs import Messages, reply_message
from xray_runtime.data.pictures import PLACEHOLDER
from xray_runtime.data.reading.json_values import check_json, parse_json, type_of, without_nulls
from xray_runtime.data.reading.keys import LEARNED, NEUTRAL, REASONING, REFUSED_KEYS, Unread, is_learned, refuse_keys
from xray_runtime.data.reading.pictures import FROM_COLUMN, StoredPicture
from xray_runtime.kernel.errors import shown

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
OF_TOOLS = ("name", "tool_call_id")
"""Keys of a tool's messages."""
READ = frozenset(("role", "content", "from", "value", "tool_calls", *LEARNED, *REASONING, *REFUSED_KEYS, *NEUTRAL))
"""Keys of a message that are read, or refused where they have a value."""


def read_messages(where: object, column: str, value: Any) -> Messages:
    """A column of messages, at least one. Raises ValueError: one line that begins with `where`."""
    messages, _ = read_conversation(where, column, value, Unread())
    if not messages:
        raise ValueError(f"{where}: {column} has only a system message without text")
    return messages


def read_conversation(where: object, column: str, value: Any, unread: Unread) -> tuple[Messages, list[bool | None]]:
    """(the messages of a column, whether each is to be learned; None: it does not say). Raises ValueError as
    `read_messages`."""
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else type_of(value)
        raise ValueError(f"{where}: {column} must be a list of messages, not {found}")
    messages: Messages = []
    learned: list[bool | None] = []
    for number, given in enumerate(value, start=1):
        place = f"{where}: message {number} of {column}"
        message, flag = _message(place, given, unread)
        if message["role"] != "system" or message["content"].strip():
            messages.append(message)
            learned.append(flag)
    return messages, learned


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


def read_tools(where: object, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The column `tools` of a record: JSON schemas of the available tools."""
    value = record.get("tools") or []
    if isinstance(value, str):
        value = _parsed(f"{where}: tools", value)
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError(f"{where}: tools must be a list of JSON schemas, or its JSON text, not {shown(value)}")
    tools: list[dict[str, Any]] = check_json(where, "tools", value)
    return tools


def _message(where: str, value: Any, unread: Unread) -> tuple[dict[str, Any], bool | None]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {type_of(value)}; allowed: an object with role and content")
    given = without_nulls(value)
    if "from" in given:
        given = _from_sharegpt(where, given)
    role = _role(where, given)
    refuse_keys(where, given, REFUSED_KEYS)
    for name, neutral in NEUTRAL.items():
        if given.get(name, neutral) != neutral:
            raise ValueError(f"{where}: {name} is {shown(given[name])}; allowed: {neutral!r}")
    learned = is_learned(where, given)
    if learned and role != "assistant":
        raise ValueError(f"{where} is to be learned and of role {role!r}; only the assistant's messages are learned")
    calls = _tool_calls(where, given.get("tool_calls") or [])
    text, reasoning = _texts(where, given, unread)
    content = given.get("content")
    parts = content if isinstance(content, list) else []
    pictures = [part.entry for part in parts if isinstance(part, StoredPicture)]
    if role != "user" and (pictures or FROM_COLUMN in parts):
        raise ValueError(f"{where} has a picture and role {role!r}; allowed: user")
    if pictures and (text or "").count(PLACEHOLDER) != len(pictures):
        raise ValueError(f"{where} has {len(pictures)} pictures in its parts, and {PLACEHOLDER} in its text")
    if role != "assistant" and (calls or reasoning):
        what = "tool_calls" if calls else "reasoning"
        raise ValueError(f"{where} has {what} and role {role!r}; allowed: assistant")
    if text is None and not calls and not reasoning:
        raise ValueError(f"{where}: content is missing; its keys are {', '.join(sorted(map(str, value))) or '(none)'}")
    of_tool = {name: _text(where, name, given[name]) for name in OF_TOOLS if name in given and role == "tool"}
    unread.add_message_keys(given.keys() - READ - of_tool.keys())
    more = of_tool | ({"pictures": pictures} if pictures else {})
    return reply_message(text or "", calls, reasoning) | {"role": role} | more, learned


def _role(where: str, given: Mapping[str, Any]) -> str:
    role = given.get("role")
    role = SAME_ROLE.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise ValueError(f"{where}: role is {shown(role)}; allowed: {', '.join(ROLES)}, developer")
    return str(role)


def _from_sharegpt(where: str, given: dict[str, Any]) -> dict[str, Any]:
    """A message of ShareGPT's with OpenAI's keys; others stay."""
    role, rest = given["from"], {key: value for key, value in given.items() if key not in ("from", "value")}
    called = role == CALLS
    message: dict[str, Any] = {"role": "assistant" if called else role}
    if "value" in given:
        text = given["value"]
        message |= (
            {"tool_calls": _parsed(where, text) if isinstance(text, str) else text} if called else {"content": text}
        )
    for key, value in message.items():
        # Many files have both forms.
        other = (
            SAME_ROLE.get(rest[key], rest[key]) if key == "role" and isinstance(rest.get(key), str) else rest.get(key)
        )
        if key in rest and other != (SAME_ROLE.get(value, value) if key == "role" else value):
            raise ValueError(f"{where}: {key} is {shown(rest[key])}, and ShareGPT's key says {shown(value)}")
    return rest | message


def _parsed(where: str, text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{where} is a text that cannot be read: {error}") from error


def _text(where: str, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {key} is {type_of(value)}; allowed: text")
    return checked_text(where, key, value)


def _texts(where: str, given: Mapping[str, Any], unread: Unread) -> tuple[str | None, str | None]:
    """(text of a message, its reasoning); None: there is none."""
    content = given.get("content")
    texts = [_text(where, key, given[key]) for key in REASONING if key in given]
    if isinstance(content, list):
        content, thought = _joined(where, content, unread)
        texts += [thought]
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"{where}: content is {type_of(content)}; allowed: text, or a list of parts")
    different = {text for text in texts if text}
    if len(different) > 1:
        raise ValueError(f"{where} has {len(different)} different reasonings; allowed: one, in reasoning_content")
    return None if content is None else checked_text(where, "content", content), next(iter(different), None)


def _joined(where: str, parts: list[Any], unread: Unread) -> tuple[str, str]:
    """(text, reasoning) of content parts, one line each, as vLLM's server joins them for templates of plain text;
    pictures stand in the lines, as templates write them."""
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    begun = False
    for part in parts:
        if part is FROM_COLUMN or isinstance(part, StoredPicture):
            before = texts["text"].pop() if texts["text"] else ""
            texts["text"].append(before + PLACEHOLDER)
            begun = True
            continue
        given = part if isinstance(part, dict) else {"type": type(part).__name__}
        kind = given.get("type")
        of = "thinking" if kind in REASONING else "text"
        text = given.get(kind, given.get("text")) if of == "thinking" else None
        if isinstance(text, list):
            text = _joined(where, text, unread)[0]
        elif kind in TEXT_PARTS:
            text = given.get("text")
        if not isinstance(text, str):
            raise ValueError(
                f"{where} has a content part of type {kind!r}, which is not supported; allowed: text, thinking; remove "
                "such rows"
            )
        unread.add_message_keys(f"content.{key}" for key in given.keys() - {"type", "text", kind})
        before = texts[of].pop() if begun and of == "text" else ""
        begun = begun and of != "text"
        texts[of].append(before + checked_text(where, "content", text))
    return "\n".join(texts["text"]), "\n".join(texts["thinking"])


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """The calls, with arguments as objects, which templates write as JSON."""
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}: tool_calls must have a function's name and arguments, not {shown(call)}")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _parsed(f"{where}: arguments of {function['name']!r}", arguments or "{}")
        if not isinstance(arguments, dict):
            raise ValueError(
                f"{where}: arguments of {function['name']!r} are {shown(arguments)}; allowed: a JSON object"
            )
        about = call if "function" in call else {}
        found.append(about | {"type": "function", "function": function | {"arguments": arguments}})
    check_json(where, "tool_calls", found)
    checked_text(where, "tool_calls", json.dumps(found, ensure_ascii=False))
    return found
