"""Where records come from: the chitchat corpus, files, and `datasets` names, in the usual column conventions.

Columns understood (TRL's and HH-RLHF's conventions): `messages`; `prompt` + `completion`; `prompt` + `chosen` +
`rejected`, each a string or a list of messages; `chosen` + `rejected` transcripts with "Human:" and "Assistant:" turns.
`tools`, a list of JSON schemas or its JSON text, is what could be called. No character of a text is changed.
A column `conversation_id`, where there is one, says which rows belong to one conversation; without it, rows with the
same messages (or the same prompt) are one.
"""

from __future__ import annotations

import codecs
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
import xxhash

from xray_runtime.data.pairs import Messages

ROLES = ("system", "user", "assistant", "tool")
ASKING = ("user", "tool")
"""Roles that an assistant answers."""
OTHER_FILES = (".json", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst", ".yaml")
"""Endings by which people's files are told from names on a hub."""

CHITCHAT = "chitchat"
"""The source that the chitchat-dataset package carries."""
READ_ROWS = 1000

TURN = re.compile(r"\n\n(Human|Assistant): ?")


@dataclass(frozen=True)
class Conversation:
    """A conversation as alternating turns, with its rating by a participant where there is one."""

    id: str
    turns: list[str]
    ratings: dict[str, int] = field(default_factory=dict)
    """witty, interesting, upbeat, each 1 to 10."""


@lru_cache(maxsize=1)
def chitchat_conversations() -> list[Conversation]:
    """The 7,168 conversations of the chitchat-dataset package, messages sent in a row by one person merged."""
    spec = importlib.util.find_spec("chitchat_dataset")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("data.source: 'chitchat' needs the package chitchat-dataset")
    raw = json.loads((Path(spec.submodule_search_locations[0]) / "dataset.json").read_text(encoding="utf-8"))
    conversations = []
    for key, conversation in raw.items():
        turns: list[str] = []
        sender = None
        for group in conversation["messages"]:
            for message in group:
                # The corpus was typed into a web form: its line ends mean nothing.
                text = " ".join(message["text"].split())
                if not text:
                    continue
                if message["sender"] == sender:
                    turns[-1] += " " + text
                else:
                    turns.append(text)
                    sender = message["sender"]
        given = conversation.get("ratings") or {}
        ratings = {name: int(value) for name, value in given.items() if str(value).isdigit()}
        conversations.append(Conversation(key, turns, ratings))
    return conversations


def read_records(field_name: str, source: str, split: str) -> tuple[int, Iterator[tuple[str, dict[str, Any]]]]:
    """(number of records, the records) of a .jsonl or .parquet file, or of a `datasets` name or directory.

    A record comes as (where, columns). `where` names the file and row for messages to people; columns that are null in
    a row are left out. One record at a time is in memory, of a `datasets` set `READ_ROWS`.

    Raises:
        ValueError: the source does not exist or cannot be read; one line that names `field_name`. A damaged line of a
            .jsonl file raises when it is reached.
    """
    path = Path(source)
    if path.suffix == ".jsonl":
        return _num_lines(field_name, path), _jsonl_records(field_name, path)
    like_a_path = path.is_absolute() or source.startswith(".") or path.suffix in OTHER_FILES
    if like_a_path and path.suffix != ".parquet" and not path.is_dir():
        # Asking the hub for what is plainly a path would only take its retries' time.
        raise ValueError(
            f"{field_name}: {source!r} is neither an existing .jsonl or .parquet file, nor a directory, nor "
            "the name of a `datasets` set"
        )
    import datasets

    try:
        if path.suffix == ".parquet":
            if not path.is_file():
                raise FileNotFoundError(f"no such file: {source}")
            data = datasets.Dataset.from_parquet(str(path))
        elif (path / "state.json").is_file():
            data = datasets.load_from_disk(source)
        elif (path / "dataset_dict.json").is_file():
            data = _split_of(datasets.load_from_disk(source), split)
        else:
            data = datasets.load_dataset(source, split=split)
    except Exception as error:  # every reader under `datasets` has exceptions of its own
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{field_name}: {source!r} cannot be read ({reason})") from error
    rows = (row for part in data.with_format("arrow").iter(READ_ROWS) for row in part.to_pylist())
    return len(data), ((f"{source} row {number}", _there(row)) for number, row in enumerate(rows, start=1))


def _split_of(data: Any, split: str) -> Any:
    if split not in data:
        raise ValueError(f"no split {split!r}; there are {', '.join(map(repr, data))}")
    return data[split]


def _num_lines(field_name: str, path: Path) -> int:
    """Lines that are not blank."""
    if not path.is_file():
        raise ValueError(f"{field_name}: {str(path)!r} is not a file")
    try:
        with path.open("rb") as file:
            return sum(not line.isspace() for line in file)
    except OSError as error:
        raise ValueError(f"{field_name}: {str(path)!r} cannot be read ({error})") from error


def _jsonl_records(field_name: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    name = str(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            where = f"{name} line {number}"
            record = _parsed(f"{field_name}: {where}", line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
            yield where, _without_nulls(record)


def _parsed(where: str, line: bytes) -> dict[str, Any]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        # Stricter than Python's, which takes lone surrogates and whole numbers of any size.
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: cannot be read as UTF-8 text ({error})") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error.msg})") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: {type(record).__name__} found, an object is expected")
    return record


def _without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record.items() if v is not None} if None in record.values() else record


def _there(value: Any) -> Any:
    """Without nulls however deep: in Arrow all structs of a column have each other's fields."""
    if isinstance(value, dict):
        return {k: _there(v) for k, v in value.items() if v is not None}
    return [_there(v) for v in value] if isinstance(value, list) else value


def conversation_id(record: dict[str, Any]) -> str:
    """Which conversation a record belongs to: its `conversation_id`, or a digest of its messages or prompt.

    Not its row number: adding rows must not move others between training and held-out data.
    """
    if "conversation_id" in record:
        return str(record["conversation_id"])
    said: Any = record.get("messages", record.get("prompt", record.get("chosen")))
    try:
        # Whatever else a message has does not make another conversation.
        text = "\x1e".join([f"{message['role']}\x1f{message['content']}" for message in said])
    except (TypeError, KeyError):
        text = str(said)
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


def prompt_and_replies(
    where: str, record: dict[str, Any], context: int | None
) -> Iterator[tuple[Messages, dict[str, Any]]]:
    """(prompt, reply) pairs of one record, a reply being the assistant's message; of a preference record the chosen.

    Of `messages`, each assistant message that answers a user or a tool is a reply, unless it has OpenAI's `weight` 0;
    its prompt is the system message, where there is one, and the up to `context` messages before it (None: all), from
    a user's on: where they begin within a tool's use, what led to it is taken too. A prompt that stands in a column of
    its own, or in an HH-RLHF transcript, is kept whole. A `completion` may be several messages, with the use of tools
    in between.

    Raises:
        ValueError: no known columns, or a column of the wrong form.
    """
    tools = _tools(where, record)
    if "messages" in record:
        messages = _messages(where, "messages", record["messages"])
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
        said = _with_tools(prompt, tools) + _completion(where, "completion", record["completion"], prompt)
        for i in range(len(prompt), len(said)):
            if said[i]["role"] == "assistant" and said[i - 1]["role"] in ASKING:
                yield said[:i], said[i]
    elif "prompt" in record and "chosen" in record:
        prompt = _prompt(where, record["prompt"])
        yield _with_tools(prompt, tools), _reply(where, "chosen", record["chosen"], prompt)
    elif "chosen" in record:
        messages = _transcript(where, "chosen", record["chosen"])
        if _ends_with_answer(messages):
            yield _with_tools(messages[:-1], tools), messages[-1]
    else:
        raise ValueError(
            f"{where}: columns {sorted(record)} are not supported; expected messages, prompt + completion, "
            "prompt + chosen + rejected, or chosen + rejected"
        )


def preference(where: str, record: dict[str, Any]) -> tuple[Messages, dict[str, Any], dict[str, Any]] | None:
    """(prompt, chosen, rejected) of one preference record, the replies as the assistant's messages.

    None: the two transcripts do not answer the same prompt, or one does not end with an answer. Collected dialogues
    hold such rows now and then; they are for the caller to count.

    Raises:
        ValueError: a column is missing or of the wrong form.
    """
    for column in ("chosen", "rejected"):
        if column not in record:
            raise ValueError(
                f"{where}: column {column!r} is missing (columns: {sorted(record)}); expected prompt + chosen + "
                "rejected, or chosen + rejected"
            )
    if "prompt" in record:
        prompt = _prompt(where, record["prompt"])
        better, worse = ([*prompt, _reply(where, c, record[c], prompt)] for c in ("chosen", "rejected"))
    else:
        better, worse = (_transcript(where, column, record[column]) for column in ("chosen", "rejected"))
        if better[:-1] != worse[:-1] or not _ends_with_answer(better) or not _ends_with_answer(worse):
            return None
    return _with_tools(better[:-1], _tools(where, record)), better[-1], worse[-1]


def asked(where: str, record: dict[str, Any]) -> Messages:
    """The prompt of one record, whatever else it has.

    Raises:
        ValueError: there is no column `prompt`, or it is of the wrong form.
    """
    if "prompt" not in record:
        raise ValueError(f"{where}: column 'prompt' is missing (columns: {sorted(record)})")
    return _with_tools(_prompt(where, record["prompt"]), _tools(where, record))


def _tools(where: str, record: dict[str, Any]) -> list[dict[str, Any]]:
    value = record.get("tools", [])
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"{where}: tools is a text that is not JSON ({error})") from error
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError(f"{where}: tools must be a list of JSON schemas, or its JSON text")
    return value


def _with_tools(prompt: Messages, tools: list[dict[str, Any]]) -> Messages:
    return [prompt[0] | {"tools": tools}, *prompt[1:]] if tools else prompt


def _messages(where: str, column: str, value: Any) -> Messages:
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise ValueError(f"{where}: {column} must be a list of messages, not {found}")
    return [_message(where, column, message) for message in value]


def _message(where: str, column: str, value: Any) -> dict[str, Any]:
    given = {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else {}
    role, calls = given.get("role"), given.get("tool_calls") or []
    content = given.get("content", "" if calls else None)
    if not isinstance(content, str):
        raise ValueError(f"{where}: {column} must hold objects with role and content, both strings")
    if role not in ROLES:
        raise ValueError(f"{where}: {column} has role {role!r}; allowed: {', '.join(ROLES)}")
    if "function_call" in given:
        raise ValueError(f"{where}: {column} has function_call, OpenAI's old form of a call; tool_calls is expected")
    message = {"role": role, "content": _text(where, column, content)}
    if calls:
        if role != "assistant":
            raise ValueError(f"{where}: {column} has tool_calls of role {role!r}; allowed: assistant")
        message["tool_calls"] = _tool_calls(where, column, calls)
    if role == "tool":
        message |= {name: _text(where, column, str(given[name])) for name in ("name", "tool_call_id") if name in given}
    return message


def _tool_calls(where: str, column: str, calls: Any) -> list[dict[str, Any]]:
    """The calls, their arguments as objects: templates write those as JSON."""
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}: {column} must hold tool_calls with a function's name and arguments")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = orjson.loads(arguments or "{}")
            except orjson.JSONDecodeError as error:
                raise ValueError(f"{where}: {column} has a tool call whose arguments are not JSON ({error})") from error
        if not isinstance(arguments, dict):
            raise ValueError(f"{where}: {column} has a tool call whose arguments are no JSON object: {arguments!r}")
        about = call if "function" in call else {}
        found.append(about | {"type": "function", "function": function | {"arguments": arguments}})
    _text(where, column, json.dumps(found, ensure_ascii=False))
    return found


def _text(where: str, column: str, text: str) -> str:
    """`text` as it is. Raises ValueError where it is no text."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        lone = ord(text[error.start])
        raise ValueError(f"{where}: {column} has a lone surrogate (U+{lone:04X}), which is not valid in text") from None
    return text


def _prompt(where: str, value: Any) -> Messages:
    if isinstance(value, str):
        return [{"role": "user", "content": _text(where, "prompt", value)}]
    messages = _messages(where, "prompt", value)
    if messages[-1]["role"] not in ASKING:
        raise ValueError(f"{where}: prompt must end with a user message (or a tool's), not {messages[-1]['role']!r}")
    return messages


def _weight(where: str, message: dict[str, Any]) -> bool:
    weight = message.get("weight", 1)
    if weight not in (0, 1, None):
        raise ValueError(f"{where}: messages has weight {weight!r}; allowed: 0 and 1")
    return weight != 0


def _reply(where: str, column: str, value: Any, prompt: Messages) -> dict[str, Any]:
    said = _completion(where, column, value, prompt)
    if len(said) > 1:
        roles = ", ".join(message["role"] for message in said)
        raise ValueError(f"{where}: {column} must be one message of the assistant's; its roles are {roles}")
    return said[0]


def _completion(where: str, column: str, value: Any, prompt: Messages) -> Messages:
    if isinstance(value, str):
        return [{"role": "assistant", "content": _text(where, column, value)}]
    messages = _messages(where, column, value)
    # Some published sets repeat the prompt before each reply.
    said = messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
    if not said or {said[0]["role"], said[-1]["role"]} != {"assistant"}:
        raise ValueError(
            f"{where}: {column} must be a string, or messages that begin and end with the assistant's, with the "
            f"prompt's before them or not; its roles are {', '.join(m['role'] for m in messages)}"
        )
    return said


def _transcript(where: str, column: str, value: Any) -> Messages:
    if isinstance(value, list):
        return _messages(where, column, value)
    if not isinstance(value, str):
        raise ValueError(f"{where}: {column} must be a string or a list of messages, not {type(value).__name__}")
    before, *parts = TURN.split("\n\n" + _text(where, column, value).lstrip("\n"))
    if before.strip() or not parts:
        raise ValueError(f"{where}: {column} must be turns that begin with '\\n\\nHuman: ' or '\\n\\nAssistant: '")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": text} for who, text in zip(parts[::2], parts[1::2], strict=True)]


def _ends_with_answer(messages: Messages) -> bool:
    roles = [message["role"] for message in messages[-2:]]
    return len(roles) == 2 and roles[0] in ASKING and roles[1] == "assistant"


def chat_pairs(conversation: Conversation, context: int | None) -> Iterator[tuple[Messages, dict[str, Any]]]:
    """Every turn but the first as a reply to the up to `context` turns before it (None: all)."""
    for i in range(1, len(conversation.turns)):
        before = conversation.turns[0 if context is None else max(0, i - context) : i]
        # The turn right before the reply is the user's; roles alternate backwards from it.
        roles = ["user" if (len(before) - 1 - j) % 2 == 0 else "assistant" for j in range(len(before))]
        if roles[0] == "assistant":
            before, roles = before[1:], roles[1:]
        prompt: Messages = [{"role": r, "content": t} for r, t in zip(roles, before, strict=True)]
        yield prompt, {"role": "assistant", "content": conversation.turns[i]}
