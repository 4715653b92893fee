"""Prompts and replies from records of users' data, whose columns determine their form.

`FORMS` maps columns to forms. Other projects' forms are converted to the standard ones: TRL's `messages`, `prompt` +
`completion`, `prompt` + `chosen` + `rejected` (each a string or a list of messages), and transcripts of HH-RLHF in
`chosen` + `rejected`. `tools` is a list of JSON schemas of the available tools, or its JSON text. A column
`conversation_id` identifies the conversation of a row; without it, rows with the same messages (or the same prompt)
form one conversation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import xxhash

from xray_runtime.data.messages import ASKING, checked_text, read_messages, read_tools
from xray_runtime.data.pairs import Messages

Record = dict[str, Any]
TURN = re.compile(r"\n\n(Human|Assistant): ?")


class Form(NamedTuple):
    """A form of records."""

    columns: tuple[str, ...]
    """Columns that a record must have."""
    name: str = ""
    """The origin of the form, if its columns do not name it."""
    usual: Callable[[object, Record], Record] = lambda where, record: record
    """Converts a record to a standard form."""

    def __str__(self) -> str:
        return " + ".join(self.columns) + (f" ({self.name})" if self.name else "")


def _alpaca_prompt(where: object, record: Record) -> list[Record]:
    """The messages before the output."""
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise ValueError(f"{where}: history must be a list of [instruction, output] pairs")
    found = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    for prompt, output in history:
        found += [{"role": "user", "content": prompt}, {"role": "assistant", "content": output}]
    given = [record["instruction"], *([record["input"]] if record.get("input") else [])]
    if not all(isinstance(part, str) for part in given):
        raise ValueError(f"{where}: instruction and input must be strings")
    return [*found, {"role": "user", "content": "\n\n".join(given)}]


def _from_alpaca(where: object, record: Record) -> Record:
    reply = {"role": "assistant", "content": record["output"]}
    return record | {"messages": [*_alpaca_prompt(where, record), reply]}


def _from_sharegpt(where: object, record: Record) -> Record:
    conversation = record["conversations"]
    if record.get("system") and isinstance(conversation, list):
        conversation = [{"role": "system", "content": record["system"]}, *conversation]
    return record | {"messages": conversation}


def _from_sharegpt_preference(where: object, record: Record) -> Record:
    replies = {
        name: [record[name]] if isinstance(record[name], dict) else record[name] for name in ("chosen", "rejected")
    }
    return record | {"prompt": _from_sharegpt(where, record)["messages"]} | replies


PREFERENCES = (
    Form(("prompt", "chosen", "rejected")),
    Form(("conversations", "chosen", "rejected"), "ShareGPT", _from_sharegpt_preference),
    Form(
        ("instruction", "chosen", "rejected"),
        "Alpaca",
        lambda where, record: record | {"prompt": _alpaca_prompt(where, record)},
    ),
    Form(("chosen", "rejected"), "HH-RLHF, or messages that begin alike"),
)
"""Forms with two replies; the first that fits is used."""
FORMS = (
    Form(("messages",)),
    *PREFERENCES[1:3],
    Form(("conversations",), "ShareGPT", _from_sharegpt),
    Form(("instruction", "output"), "Alpaca", _from_alpaca),
    Form(("prompt", "completion")),
    PREFERENCES[0],
    PREFERENCES[3],
)
"""Forms of conversations; the first that fits is used. From two replies the chosen one is read."""


def usual(where: object, record: Record, forms: tuple[Form, ...] = FORMS) -> Record:
    """`record` in a standard form. Raises ValueError if its columns match no form."""
    for form in forms:
        if all(column in record for column in form.columns):
            return form.usual(where, record)
    raise ValueError(
        f"{where}: the columns {', '.join(map(repr, sorted(record))) or '(none)'} match no supported form: "
        f"{'; '.join(map(str, forms))}"
    )


def conversation_id(record: Record) -> str:
    """The conversation of a record in a standard form: its `conversation_id`, or a digest of its messages or prompt.

    A row number would move other rows between training and held-out data when rows are added.
    """
    if "conversation_id" in record:
        return str(record["conversation_id"])
    content: Any = record.get("messages", record.get("prompt", record.get("chosen")))
    try:
        # Other fields of a message do not distinguish conversations.
        text = "\x1e".join([f"{message['role']}\x1f{message['content']}" for message in content])
    except (TypeError, KeyError):
        text = str(content)
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


def prompt_and_replies(where: object, record: Record, context: int | None) -> Iterator[tuple[Messages, Record]]:
    """(prompt, reply) pairs of a record in a standard form. A reply is an assistant's message; of two, the chosen one.

    In `messages`, each assistant message that answers a user or a tool is a reply, unless it has OpenAI's `weight` 0.
    Its prompt is the system message, if any, and up to `context` messages before it (None: all), extended backwards to
    the nearest user message. A prompt in a separate column, or in an HH-RLHF transcript, is kept whole. A `completion`
    may be several messages with tool use. Raises ValueError if a column has the wrong form.
    """
    tools = read_tools(where, record)
    if record.get("messages") == []:
        return
    if "messages" in record:
        messages = read_messages(where, "messages", record["messages"])
        system = [m for m in messages[:1] if m["role"] == "system"]
        asked_by = [i for i, message in enumerate(messages) if message["role"] == "user"]
        for i, message in enumerate(messages):
            before = [j for j in asked_by if j < i]
            learned = message["role"] == "assistant" and _weight(where, record["messages"][i])
            if learned and i and messages[i - 1]["role"] in ASKING and before:
                begin = len(system) if context is None else max(len(system), i - context)
                start = next((j for j in before if j >= begin), before[-1])
                yield _with_tools(system + messages[start:i], tools), message
    elif "prompt" in record and "completion" in record:
        prompt = _prompt(where, record["prompt"])
        messages = _with_tools(prompt, tools) + _completion(where, "completion", record["completion"], prompt)
        for i in range(len(prompt), len(messages)):
            if messages[i]["role"] == "assistant" and messages[i - 1]["role"] in ASKING:
                yield messages[:i], messages[i]
    elif "prompt" in record and "chosen" in record:
        prompt = _prompt(where, record["prompt"])
        yield _with_tools(prompt, tools), _reply(where, "chosen", record["chosen"], prompt)
    else:
        messages = _transcript(where, "chosen", record["chosen"])
        if _ends_with_answer(messages):
            yield _with_tools(messages[:-1], tools), messages[-1]


def preference(where: object, record: Record) -> tuple[Messages, Record, Record] | None:
    """(prompt, chosen, rejected) of one preference record, with replies as assistant messages.

    None: the two transcripts do not answer the same prompt, or one does not end with an answer. Collected dialogues
    contain a few such rows; the caller counts them. Raises ValueError if its columns match no form with two replies, or
    one has the wrong form.
    """
    record = usual(where, record, PREFERENCES)
    if "prompt" in record:
        prompt = _prompt(where, record["prompt"])
        better, worse = ([*prompt, _reply(where, c, record[c], prompt)] for c in ("chosen", "rejected"))
    else:
        better, worse = (_transcript(where, column, record[column]) for column in ("chosen", "rejected"))
        if better[:-1] != worse[:-1] or not _ends_with_answer(better) or not _ends_with_answer(worse):
            return None
    return _with_tools(better[:-1], read_tools(where, record)), better[-1], worse[-1]


def prompt_of(where: object, record: Record) -> Messages:
    """The column `prompt` of one record. Raises ValueError if it is missing or has the wrong form."""
    if "prompt" not in record:
        raise ValueError(f"{where}: column 'prompt' is missing (columns: {sorted(record)})")
    return _with_tools(_prompt(where, record["prompt"]), read_tools(where, record))


def _with_tools(prompt: Messages, tools: list[Record]) -> Messages:
    return [prompt[0] | {"tools": tools}, *prompt[1:]] if tools else prompt


def _prompt(where: object, value: Any) -> Messages:
    if isinstance(value, str):
        return [{"role": "user", "content": checked_text(where, "prompt", value)}]
    messages = read_messages(where, "prompt", value)
    if messages[-1]["role"] not in ASKING:
        raise ValueError(f"{where}: prompt must end with a user message (or a tool's), not {messages[-1]['role']!r}")
    return messages


def _weight(where: object, message: Record) -> bool:
    weight = message.get("weight", 1)
    if weight not in (0, 1, None):
        raise ValueError(f"{where}: messages has weight {weight!r}; allowed: 0 and 1")
    return weight != 0


def _reply(where: object, column: str, value: Any, prompt: Messages) -> Record:
    replies = _completion(where, column, value, prompt)
    if len(replies) > 1:
        roles = ", ".join(message["role"] for message in replies)
        raise ValueError(f"{where}: {column} must be one message of the assistant's; its roles are {roles}")
    return replies[0]


def _completion(where: object, column: str, value: Any, prompt: Messages) -> Messages:
    if isinstance(value, str):
        return [{"role": "assistant", "content": checked_text(where, column, value)}]
    messages = read_messages(where, column, value)
    # Some published datasets repeat the prompt before each reply.
    completion = messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
    if not completion or {completion[0]["role"], completion[-1]["role"]} != {"assistant"}:
        raise ValueError(
            f"{where}: {column} must be a string, or messages that begin and end with the assistant's, optionally "
            f"after the prompt's; its roles are {', '.join(m['role'] for m in messages)}"
        )
    return completion


def _transcript(where: object, column: str, value: Any) -> Messages:
    if isinstance(value, list):
        return read_messages(where, column, value)
    if not isinstance(value, str):
        raise ValueError(f"{where}: {column} must be a string or a list of messages, not {type(value).__name__}")
    before, *parts = TURN.split("\n\n" + checked_text(where, column, value).lstrip("\n"))
    if before.strip() or not parts:
        raise ValueError(f"{where}: {column} must be turns that begin with '\\n\\nHuman: ' or '\\n\\nAssistant: '")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": text} for who, text in zip(parts[::2], parts[1::2], strict=True)]


def _ends_with_answer(messages: Messages) -> bool:
    roles = [message["role"] for message in messages[-2:]]
    return len(roles) == 2 and roles[0] in ASKING and roles[1] == "assistant"
