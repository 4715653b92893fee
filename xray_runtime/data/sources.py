"""Where records come from: the chitchat corpus, files, and `datasets` names, in the usual column conventions.

Columns understood (TRL's and HH-RLHF's conventions): `messages`; `prompt` + `completion`; `prompt` + `chosen` +
`rejected`, each a string or a list of messages; `chosen` + `rejected` transcripts with "Human:" and "Assistant:" turns.
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

ROLES = ("system", "user", "assistant")
OTHER_FILES = (".json", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst", ".yaml")
"""Endings by which people's files are told from names on a hub."""

READ_ROWS = 1000

TURN = re.compile(r"\n\n(Human|Assistant): ?")


@dataclass(frozen=True)
class Conversation:
    """A conversation as alternating turns, with its rating by a participant where there is one."""

    id: str
    turns: list[str]
    ratings: dict[str, int] = field(default_factory=dict)
    """witty, interesting, upbeat, each 1 to 10."""


def clean(text: str) -> str:
    """Whitespace runs become one space, none at the ends; what UTF-8 cannot hold (lone surrogates) becomes "?"."""
    # Of all whitespace only " " is printable, and no surrogate is: most texts are clean already.
    if text.isprintable() and "  " not in text and not text.startswith(" ") and not text.endswith(" "):
        return text
    return " ".join(text.encode("utf-8", "replace").decode("utf-8").split())


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
                text = clean(message["text"])
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
            f"{field_name}: {source!r} is no .jsonl or .parquet file that exists, no directory, and no name of a "
            "`datasets` set"
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
        raise ValueError(f"{field_name}: {source!r} cannot be read ({clean(str(error))[:200]})") from error
    rows = (row for part in data.with_format("arrow").iter(READ_ROWS) for row in part.to_pylist())
    return len(data), ((f"{source} row {number}", _without_nulls(row)) for number, row in enumerate(rows, start=1))


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


def prompt_and_replies(where: str, record: dict[str, Any], context: int) -> Iterator[tuple[Messages, str]]:
    """(prompt, reply) pairs of one record; of a preference record the chosen reply.

    Of `messages`, each assistant message that answers a user is a reply; its prompt is the system message, where there
    is one, and the up to `context` messages before it, from a user's on. A prompt that stands in a column of its own,
    or in an HH-RLHF transcript, is kept whole.

    Raises:
        ValueError: no known columns, or a column of the wrong form.
    """
    if "messages" in record:
        messages = _messages(where, "messages", record["messages"])
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and i and messages[i - 1]["role"] == "user":
                system = [m for m in messages[:1] if m["role"] == "system"]
                before = messages[len(system) : i][-context:]
                yield system + before[before[0]["role"] == "assistant" :], message["content"]
    elif "prompt" in record and "completion" in record:
        prompt = _prompt(where, record["prompt"])
        yield prompt, _reply(where, "completion", record["completion"], prompt)
    elif "prompt" in record and "chosen" in record:
        prompt = _prompt(where, record["prompt"])
        yield prompt, _reply(where, "chosen", record["chosen"], prompt)
    elif "chosen" in record:
        messages = _transcript(where, "chosen", record["chosen"])
        if _ends_with_answer(messages):
            yield messages[:-1], messages[-1]["content"]
    else:
        raise ValueError(
            f"{where}: columns {sorted(record)} are not understood; expected messages, prompt + completion, "
            "prompt + chosen + rejected, or chosen + rejected"
        )


def preference(where: str, record: dict[str, Any]) -> tuple[Messages, str, str] | None:
    """(prompt, chosen, rejected) of one preference record.

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
        chosen, rejected = (_reply(where, column, record[column], prompt) for column in ("chosen", "rejected"))
        return prompt, chosen, rejected
    better, worse = (_transcript(where, column, record[column]) for column in ("chosen", "rejected"))
    if better[:-1] != worse[:-1] or not _ends_with_answer(better) or not _ends_with_answer(worse):
        return None
    return better[:-1], better[-1]["content"], worse[-1]["content"]


def asked(where: str, record: dict[str, Any]) -> Messages:
    """The prompt of one record, whatever else it has.

    Raises:
        ValueError: there is no column `prompt`, or it is of the wrong form.
    """
    if "prompt" not in record:
        raise ValueError(f"{where}: column 'prompt' is missing (columns: {sorted(record)})")
    return _prompt(where, record["prompt"])


def _messages(where: str, column: str, value: Any) -> Messages:
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise ValueError(f"{where}: {column} must be a list of messages, not {found}")
    messages = []
    for message in value:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str):
            raise ValueError(f"{where}: {column} must hold objects with role and content, both strings")
        role = message.get("role")
        if role not in ROLES:
            raise ValueError(f"{where}: {column} has role {role!r}; allowed: {', '.join(ROLES)}")
        messages.append({"role": role, "content": clean(content)})
    return messages


def _prompt(where: str, value: Any) -> Messages:
    if isinstance(value, str):
        return [{"role": "user", "content": clean(value)}]
    messages = _messages(where, "prompt", value)
    if messages[-1]["role"] != "user":
        raise ValueError(f"{where}: prompt must end with a user message, not {messages[-1]['role']!r}")
    return messages


def _reply(where: str, column: str, value: Any, prompt: Messages) -> str:
    if isinstance(value, str):
        return clean(value)
    messages = _messages(where, column, value)
    # Some published sets repeat the prompt before each reply.
    if messages[-1]["role"] != "assistant" or messages[:-1] not in ([], prompt):
        raise ValueError(
            f"{where}: {column} must be a string, one assistant message, or the prompt's messages and one assistant "
            f"message; its roles are {', '.join(m['role'] for m in messages)}"
        )
    return messages[-1]["content"]


def _transcript(where: str, column: str, value: Any) -> Messages:
    if isinstance(value, list):
        return _messages(where, column, value)
    if not isinstance(value, str):
        raise ValueError(f"{where}: {column} must be a string or a list of messages, not {type(value).__name__}")
    before, *parts = TURN.split("\n\n" + value.lstrip("\n"))
    if before.strip() or not parts:
        raise ValueError(f"{where}: {column} must be turns that begin with '\\n\\nHuman: ' or '\\n\\nAssistant: '")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": clean(text)} for who, text in zip(parts[::2], parts[1::2], strict=True)]


def _ends_with_answer(messages: Messages) -> bool:
    return [message["role"] for message in messages[-2:]] == ["user", "assistant"]


def chat_pairs(conversation: Conversation, context: int) -> Iterator[tuple[Messages, str]]:
    """Every turn but the first as a reply to the up to `context` turns before it."""
    for i in range(1, len(conversation.turns)):
        before = conversation.turns[max(0, i - context) : i]
        # The turn right before the reply is the user's; roles alternate backwards from it.
        roles = ["user" if (len(before) - 1 - j) % 2 == 0 else "assistant" for j in range(len(before))]
        if roles[0] == "assistant":
            before, roles = before[1:], roles[1:]
        yield [{"role": r, "content": t} for r, t in zip(roles, before, strict=True)], conversation.turns[i]
