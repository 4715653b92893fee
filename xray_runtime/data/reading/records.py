"""Prompts and replies from records in a standard form (`forms.usual`).

`tools` is a list of JSON schemas of the available tools, or its JSON text. A column `conversation_id` identifies the
conversation of a row; without it, rows with the same messages (or the same prompt) form one conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import xxhash

from xray_runtime.data.messages import ASKING, SAME_ROLE, checked_text, read_conversation, read_tools
from xray_runtime.data.pairs import Messages
from xray_runtime.data.pictures import PLACEHOLDER as PICTURE
from xray_runtime.data.reading.forms import PREFERENCES, Record, usual
from xray_runtime.data.reading.json_values import type_of
from xray_runtime.data.reading.keys import Unread, is_desirable, is_learned, refuse_columns
from xray_runtime.data.reading.pictures import StoredPicture
from xray_runtime.kernel.errors import shown

TURN = re.compile(r"\n\n(Human|Assistant): ?")
TRANSCRIPT = re.compile(r"\s*Human:.*\n\nAssistant:|\n\nHuman:|.*\n\nAssistant:\s*\Z", re.DOTALL)
"""Matches HH-RLHF's transcripts, where a plain text is also allowed."""
PLACEHOLDER = re.compile(r"(\s*<(image|video|audio)>)+")
Learned = list[bool | None]


def conversation_id(where: object, record: Record) -> str:
    """The conversation of a record in a standard form: its `conversation_id`, or a digest of its messages or prompt.

    A row number would move other rows between training and held-out data when rows are added. Raises ValueError if
    `conversation_id` is neither text nor a whole number.
    """
    given = record.get("conversation_id")
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, str | int):
            raise ValueError(f"{where}: conversation_id is {type_of(given)}; allowed: text, a whole number")
        return str(given)
    content: Any = record.get("messages", record.get("prompt", record.get("chosen")))
    if isinstance(content, list):
        content = "\x1e".join(map(_identity, content))
    if "images" in record:
        content = f"{content}\x1e{record['images']}"
    return xxhash.xxh3_64_hexdigest(str(content).encode("utf-8", "surrogatepass"))


def _identity(message: Any) -> str:
    """Role and text; other keys do not distinguish conversations."""
    given = message if isinstance(message, dict) else {}
    role, content = given.get("role", given.get("from")), given.get("content", given.get("value", ""))
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, default=repr)
    return f"{SAME_ROLE.get(str(role), role)}\x1f{text}"


def left_out(where: object, record: Record) -> str | None:
    """Why the replies of a record are not learned: `undesirable` by KTO's label, or `weight_0`; None: they are. Raises
    ValueError if a key that says so has another value."""
    if is_learned(where, record) is False:
        return "weight_0"
    return None if is_desirable(where, record) else "undesirable"


def prompt_and_replies(
    where: object, record: Record, context: int | None, unread: Unread | None = None
) -> Iterator[tuple[Messages, Record | None]]:
    """(prompt, reply) pairs of a record in a standard form. A reply is an assistant's message; of two, the chosen one;
    None: a prompt alone, which ends a record without an answer.

    In `messages`, each assistant message that answers a user or a tool is a reply, unless a key says that it is not
    learned. Its prompt is all messages before it, or the system messages and up to `context` messages before it,
    extended backwards to the nearest user message. A prompt in a separate column, or in an HH-RLHF transcript, is kept
    whole. A `completion` may be several messages with tool use. Raises ValueError if a column has the wrong form.
    """
    unread = unread or Unread()
    tools = read_tools(where, record)
    if record.get("messages") == []:
        return
    if "messages" in record:
        messages, learned = _conversation(where, "messages", record, unread)
        pairs = _replies(where, "messages", messages, learned, 0, context)
    elif "prompt" in record and "completion" in record:
        prompt = _prompt(where, record, unread)
        completion, learned = _completion(where, "completion", record, prompt, unread)
        learned = [*(None for _ in prompt), *learned]
        pairs = _replies(where, "completion", prompt + completion, learned, len(prompt), None)
    elif "prompt" in record and "chosen" in record:
        prompt = _prompt(where, record, unread)
        pairs = iter([(prompt, _reply(where, "chosen", record, prompt, unread))])
    elif "prompt" in record:
        pairs = iter([(_prompt(where, record, unread), None)])
    else:
        messages = _whole(where, "chosen", record, unread)
        pairs = iter([(messages[:-1], messages[-1])] if _ends_with_answer(messages) else [])
    for messages, reply in pairs:
        yield _with_tools(messages, tools), reply


def _replies(
    where: object, column: str, messages: Messages, learned: Learned, first: int, context: int | None
) -> Iterator[tuple[Messages, Record | None]]:
    """The pairs of a conversation whose replies begin at message `first`."""
    for number in range(first, len(messages)):
        if messages[number]["role"] != "assistant":
            continue
        if _is_asked(messages[:number]):
            if learned[number] is not False:
                yield _context(messages[:number], context), messages[number]
        elif learned[number]:
            text = shown(messages[number]["content"])
            raise ValueError(
                f"{where}: {column}: the message {text} is to be learned, but answers neither a user nor a tool"
            )
    if messages and messages[-1]["role"] != "assistant" and _is_asked(messages):
        yield _context(messages, context), None


def _is_asked(messages: Messages) -> bool:
    """Whether an assistant's reply must follow."""
    roles = [message["role"] for message in messages if message["role"] != "system"]
    return "user" in roles and roles[-1] in ASKING


def _context(before: Messages, context: int | None) -> Messages:
    """All messages before a reply; or `context` of them from the nearest user message on, and all system messages."""
    start = 0
    leading = next((n for n, message in enumerate(before) if message["role"] != "system"), len(before))
    if context is not None and len(before) - context > leading:
        users = [n for n, message in enumerate(before) if message["role"] == "user"]
        start = next((n for n in users if n >= len(before) - context), users[-1])
    return [message for message in before[:start] if message["role"] == "system"] + before[start:]


def preference(where: object, record: Record, unread: Unread | None = None) -> tuple[Messages, Record, Record] | None:
    """(prompt, chosen, rejected) of one preference record, with replies as assistant messages.

    None: the two transcripts do not answer the same prompt, or one does not end with an answer. Collected dialogues
    contain a few such rows; the caller counts them. Raises ValueError if its columns match no form with two replies, or
    one has the wrong form.
    """
    unread = Unread() if unread is None else unread
    record = usual(where, record, PREFERENCES, unread=unread)
    reason = left_out(where, record)
    if reason is not None:
        key = "label" if reason == "undesirable" else "weight"
        raise ValueError(f"{where}: {key} is false or 0: a pair of replies is learned whole; remove such rows")
    if "prompt" in record:
        prompt = _prompt(where, record, unread)
        better, worse = ([*prompt, _reply(where, c, record, prompt, unread)] for c in ("chosen", "rejected"))
    else:
        better, worse = (_whole(where, column, record, unread) for column in ("chosen", "rejected"))
        if better[:-1] != worse[:-1] or not _ends_with_answer(better) or not _ends_with_answer(worse):
            return None
    return _with_tools(better[:-1], read_tools(where, record)), better[-1], worse[-1]


def prompt_of(where: object, record: Record) -> Messages:
    """The column `prompt` of one record. Raises ValueError if it is missing or has the wrong form."""
    if "prompt" not in record:
        raise ValueError(f"{where}: column 'prompt' is missing (columns: {sorted(record)})")
    refuse_columns(where, record)
    return _with_tools(_prompt(where, record, Unread()), read_tools(where, record))


def _with_tools(prompt: Messages, tools: list[Record]) -> Messages:
    return [prompt[0] | {"tools": tools}, *prompt[1:]] if tools else prompt


def _conversation(where: object, column: str, record: Record, unread: Unread) -> tuple[Messages, Learned]:
    """(messages of a column after the record's `system`, whether each is to be learned)."""
    messages, learned = read_conversation(where, column, record[column], unread)
    messages = _with_pictures(where, column, messages, record)
    if column != "completion" and record.get("reasoning_content"):
        raise ValueError(
            f"{where}: reasoning_content is a column beside {column}, a list of messages: make it a key of the "
            "assistant's message"
        )
    system = _system(where, record)
    if system and messages[:1] != system:
        if messages and messages[0]["role"] == "system":
            raise ValueError(f"{where}: system differs from the system message of {column}; allowed: one of the two")
        return system + messages, [None, *learned]
    return messages, learned


def _system(where: object, record: Record) -> Messages:
    """The column `system` as messages."""
    text = record.get("system")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{where}: system is {type_of(text)}; allowed: text")
    return [{"role": "system", "content": checked_text(where, "system", text)}] if text and text.strip() else []


def _prompt(where: object, record: Record, unread: Unread) -> Messages:
    value = record["prompt"]
    if isinstance(value, str) and not TRANSCRIPT.match(value):
        messages = [{"role": "user", "content": checked_text(where, "prompt", value)}]
        return _system(where, record) + _with_pictures(where, "prompt", messages, record)
    if isinstance(value, str):
        messages = _transcript(where, "prompt", value)
        if messages[-1]["role"] == "assistant" and not messages[-1]["content"].strip():
            messages.pop()
        messages = _system(where, record) + messages
    else:
        messages, learned = _conversation(where, "prompt", record | {"reasoning_content": None}, unread)
        _refuse_learned(where, "prompt", learned)
    if not messages or messages[-1]["role"] not in ASKING:
        role = repr(messages[-1]["role"]) if messages else "an empty list"
        raise ValueError(f"{where}: prompt must end with a user message (or a tool's), not {role}")
    return messages


def _refuse_learned(where: object, column: str, learned: Learned) -> None:
    if True in learned:
        number = learned.index(True) + 1
        raise ValueError(f"{where}: message {number} of {column} is to be learned; only the reply after it is learned")


def _reply(where: object, column: str, record: Record, prompt: Messages, unread: Unread) -> Record:
    replies, learned = _completion(where, column, record, prompt, unread)
    if len(replies) > 1:
        roles = ", ".join(message["role"] for message in replies)
        raise ValueError(f"{where}: {column} must be one message of the assistant's; its roles are {roles}")
    if learned[0] is False:
        raise ValueError(f"{where}: {column} is not to be learned; remove such rows")
    return replies[0]


def _completion(
    where: object, column: str, record: Record, prompt: Messages, unread: Unread
) -> tuple[Messages, Learned]:
    """(messages of a completion without the prompt's, whether each is to be learned)."""
    value, reasoning = record[column], record.get("reasoning_content") if column == "completion" else None
    if isinstance(value, str) and not value.startswith("\n\nHuman:"):
        message = {"role": "assistant", "content": value, "reasoning_content": reasoning}
        return read_conversation(where, column, [message], unread)
    if reasoning:
        raise ValueError(
            f"{where}: reasoning_content is a column beside {column}, {type_of(value)} of messages: make it a key of "
            "the assistant's message"
        )
    if isinstance(value, str):
        messages = _transcript(where, column, value)
        learned: Learned = [None] * len(messages)
    else:
        messages, learned = read_conversation(where, column, value, unread)
    # Some published datasets repeat the prompt before each reply.
    repeated = (prompt, [message for message in prompt if message["role"] != "system"])
    after = next((len(begin) for begin in repeated if messages[: len(begin)] == begin), 0)
    completion = messages[after:]
    if not completion or {completion[0]["role"], completion[-1]["role"]} != {"assistant"}:
        raise ValueError(
            f"{where}: {column} must be a string, or messages that begin and end with the assistant's, optionally "
            f"after the prompt's; its roles are {', '.join(m['role'] for m in messages)}"
        )
    return completion, learned[after:]


def _whole(where: object, column: str, record: Record, unread: Unread) -> Messages:
    """A transcript, or a list of messages, with its reply at the end."""
    if not isinstance(record[column], list):
        return _system(where, record) + _transcript(where, column, record[column])
    messages, learned = _conversation(where, column, record, unread)
    _refuse_learned(where, column, learned[:-1])
    if learned and learned[-1] is False:
        raise ValueError(f"{where}: the last message of {column} is not to be learned; remove such rows")
    return messages


def _transcript(where: object, column: str, value: Any) -> Messages:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {column} must be a string or a list of messages, not {type_of(value)}")
    before, *parts = TURN.split("\n\n" + checked_text(where, column, value).lstrip("\n"))
    if before.strip() or not parts:
        raise ValueError(f"{where}: {column} must be turns that begin with '\\n\\nHuman: ' or '\\n\\nAssistant: '")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": text} for who, text in zip(parts[::2], parts[1::2], strict=True)]


def _ends_with_answer(messages: Messages) -> bool:
    return bool(messages) and messages[-1]["role"] == "assistant" and _is_asked(messages[:-1])


def _with_pictures(where: object, column: str, messages: Messages, record: Record) -> Messages:
    """The messages with the pictures of the column `images`, one for each placeholder. Raises ValueError: their numbers
    differ."""
    pictures: list[StoredPicture] | None = record.get("images")
    if pictures is None:
        _refuse_placeholders(where, column, messages)
        return messages
    if any(message.get("pictures") for message in messages):
        raise ValueError(f"{where}: it has pictures in images and in {column}; allowed: one of the two")
    counts = [message["content"].count(PICTURE) if message["role"] == "user" else 0 for message in messages]
    if sum(counts) != len(pictures):
        raise ValueError(
            f"{where}: {column} has {sum(counts)} placeholders {PICTURE}, and images has {len(pictures)} pictures"
        )
    remaining = iter(picture.entry for picture in pictures)
    return [
        message | ({"pictures": list(islice(remaining, count))} if count else {})
        for message, count in zip(messages, counts, strict=True)
    ]


def _refuse_placeholders(where: object, column: str, messages: Messages) -> None:
    """Raises ValueError if a user's message begins with the placeholder of a picture, or its last line is one.

    A text that only mentions `<image>`, or has a closing tag, is a text."""
    for number, message in enumerate(messages, start=1):
        text = message["content"]
        if message["role"] != "user" or "<" not in text or message.get("pictures"):
            continue
        match = PLACEHOLDER.match(text) or PLACEHOLDER.fullmatch(text.rstrip().rpartition("\n")[2])
        if match and f"</{match[2]}>" not in text:
            raise ValueError(
                f"{where}: message {number} of {column} has the placeholder {shown(match[0].strip())} of a picture, "
                "sound or video, which the row does not have; sounds and videos are not read"
            )
