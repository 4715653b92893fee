"""Where records come from: the chitchat corpus, files, and `datasets` names, in the usual column conventions.

Columns understood (TRL's and HH-RLHF's conventions): `messages`; `prompt` + `completion`; `prompt` + `chosen` +
`rejected`, each a string or a list of messages; `chosen` + `rejected` transcripts with "Human:" and "Assistant:" turns.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from xray_runtime.data.pairs import Messages

ROLES = ("system", "user", "assistant")
TURN = re.compile(r"\n\n(Human|Assistant): ?")


@dataclass(frozen=True)
class Conversation:
    """A conversation as alternating turns, with its rating by a participant where there is one."""

    id: str
    turns: list[str]
    ratings: dict[str, int] = field(default_factory=dict)
    """witty, interesting, upbeat, each 1 to 10."""


def clean(text: str) -> str:
    """Whitespace runs become one space; none at the ends."""
    return " ".join(text.split())


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


def read_records(field_name: str, source: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, record) of a .jsonl or .parquet file or a `datasets` name or directory.

    Raises:
        ValueError: the source does not exist or cannot be read; one line that names `field_name`.
    """
    path = Path(source)
    if path.suffix == ".jsonl":
        yield from _read_jsonl(field_name, path)
        return
    import datasets

    try:
        if path.suffix == ".parquet":
            if not path.is_file():
                raise FileNotFoundError(f"no such file: {source}")
            data = datasets.load_dataset("parquet", data_files=str(path), split="train")
        elif path.is_dir() and (path / "dataset_info.json").exists():
            data = datasets.load_from_disk(source)
        else:
            data = datasets.load_dataset(source, split=split)
    except Exception as error:
        reason = clean(str(error))[:200]
        raise ValueError(f"{field_name}: {source!r} cannot be read ({reason})") from error
    for number, record in enumerate(data):
        yield f"{source} row {number}", dict(record)


def _read_jsonl(field_name: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        raise ValueError(f"{field_name}: {str(path)!r} is not a file")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path} line {number}"
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{field_name}: {where}: not JSON ({error.msg})") from error
            if not isinstance(record, dict):
                raise ValueError(f"{field_name}: {where}: {type(record).__name__} found, an object is expected")
            yield where, record


def prompt_and_replies(where: str, record: dict[str, Any], context: int) -> Iterator[tuple[Messages, str]]:
    """(prompt, reply) pairs of one record; of a preference record the chosen reply.

    Of `messages`, each assistant message that answers a user is a reply; its prompt is the system message, where there
    is one, and the up to `context` messages before it.

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
        yield _prompt(where, record["prompt"]), _reply(where, "completion", record["completion"])
    elif "chosen" in record and "rejected" in record:
        prompt, chosen, _ = preference(where, record)
        yield prompt, chosen
    else:
        raise ValueError(
            f"{where}: columns {sorted(record)} are not understood; expected messages, prompt + completion, "
            "prompt + chosen + rejected, or chosen + rejected"
        )


def preference(where: str, record: dict[str, Any]) -> tuple[Messages, str, str]:
    """(prompt, chosen, rejected) of one preference record. Raises ValueError as `prompt_and_replies` does."""
    for column in ("chosen", "rejected"):
        if column not in record:
            raise ValueError(f"{where}: column {column!r} is missing (columns: {sorted(record)})")
    if "prompt" in record:
        return (
            _prompt(where, record["prompt"]),
            _reply(where, "chosen", record["chosen"]),
            _reply(where, "rejected", record["rejected"]),
        )
    chosen = _transcript(where, "chosen", record["chosen"])
    rejected = _transcript(where, "rejected", record["rejected"])
    if chosen[:-1] != rejected[:-1]:
        raise ValueError(f"{where}: chosen and rejected differ before their last turn")
    return chosen[:-1], chosen[-1]["content"], rejected[-1]["content"]


def _messages(where: str, column: str, value: Any) -> Messages:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: {column} must be a list of messages, not {type(value).__name__}")
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f"{where}: {column} must hold objects with role and content")
        if message.get("role") not in ROLES:
            raise ValueError(f"{where}: {column} has role {message.get('role')!r}; allowed: {', '.join(ROLES)}")
        messages.append({"role": message["role"], "content": clean(message["content"])})
    return messages


def _prompt(where: str, value: Any) -> Messages:
    if isinstance(value, str):
        return [{"role": "user", "content": clean(value)}]
    messages = _messages(where, "prompt", value)
    if messages[-1]["role"] != "user":
        raise ValueError(f"{where}: prompt must end with a user message, not {messages[-1]['role']!r}")
    return messages


def _reply(where: str, column: str, value: Any) -> str:
    if isinstance(value, str):
        return clean(value)
    messages = _messages(where, column, value)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"{where}: {column} must end with an assistant message, not {messages[-1]['role']!r}")
    return messages[-1]["content"]


def _transcript(where: str, column: str, value: Any) -> Messages:
    if isinstance(value, list):
        messages = _messages(where, column, value)
    elif isinstance(value, str):
        parts = TURN.split("\n\n" + value.lstrip("\n"))[1:]
        roles = {"Human": "user", "Assistant": "assistant"}
        messages = [
            {"role": roles[who], "content": clean(text)} for who, text in zip(parts[::2], parts[1::2], strict=True)
        ]
    else:
        raise ValueError(f"{where}: {column} must be a string or a list of messages, not {type(value).__name__}")
    if len(messages) < 2 or messages[-1]["role"] != "assistant" or messages[-2]["role"] != "user":
        raise ValueError(f"{where}: {column} must end with a Human turn and an Assistant turn")
    return messages


def chat_pairs(conversation: Conversation, context: int) -> Iterable[tuple[Messages, str]]:
    """Every turn but the first as a reply to the up to `context` turns before it."""
    for i in range(1, len(conversation.turns)):
        before = conversation.turns[max(0, i - context) : i]
        # The turn right before the reply is the user's; roles alternate backwards from it.
        roles = ["user" if (len(before) - 1 - j) % 2 == 0 else "assistant" for j in range(len(before))]
        if roles[0] == "assistant":
            before, roles = before[1:], roles[1:]
        yield [{"role": r, "content": t} for r, t in zip(roles, before, strict=True)], conversation.turns[i]
