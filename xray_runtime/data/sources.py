"""Sources of records: the chitchat corpus, files, and `datasets` names and directories."""

from __future__ import annotations

import codecs
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from xray_runtime.data.pairs import Messages

OTHER_FILES = (".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst", ".yaml")
"""File endings, which distinguish files from names on a hub."""

CHITCHAT = "chitchat"
"""The source that the chitchat-dataset package carries."""
READ_ROWS = 1000


class Where(NamedTuple):
    """The position of a record for messages: its source, and its line or row from 1."""

    source: str
    unit: str
    number: int

    def __str__(self) -> str:
        return f"{self.source} {self.unit} {self.number}"


@dataclass(frozen=True)
class Conversation:
    """A conversation as alternating turns, with a participant's rating if there is one."""

    id: str
    turns: list[str]
    ratings: dict[str, int] = field(default_factory=dict)
    """witty, interesting, upbeat, each 1 to 10."""


@lru_cache(maxsize=1)
def chitchat_conversations() -> list[Conversation]:
    """The 7,168 conversations of the chitchat-dataset package, consecutive messages of one person merged."""
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
                # The corpus was typed into a web form, so its line ends have no meaning.
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


def read_records(field_name: str, source: str, split: str) -> tuple[int, Iterator[tuple[Where, dict[str, Any]]]]:
    """(number of records, the records) of a .jsonl, .json or .parquet file, or of a `datasets` name or directory.

    A record is (position, columns) without null columns. One record is in memory at a time; of a `datasets` set
    `READ_ROWS`, of a .json array all.

    Raises:
        ValueError: the source does not exist or cannot be read; one line that names `field_name`. A damaged line of a
            .jsonl file raises when it is reached.
    """
    path = Path(source)
    if path.suffix == ".json" and _begins_an_array(path):
        items = _array(field_name, path)
        return len(items), ((Where(source, "row", n), _there(item)) for n, item in enumerate(items, start=1))
    if path.suffix in (".jsonl", ".json"):
        return _num_lines(field_name, path), _jsonl_records(field_name, path)
    like_a_path = path.is_absolute() or source.startswith(".") or path.suffix in OTHER_FILES
    if like_a_path and path.suffix != ".parquet" and not path.is_dir():
        # Requests to the hub for a path would only spend the time of their retries.
        raise ValueError(
            f"{field_name}: {source!r} does not exist: must be a .jsonl, .json or .parquet file, a directory, or the "
            "name of a `datasets` set"
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
            data = datasets.load_from_disk(source)
            if split not in data:
                raise ValueError(f"no split {split!r}; there are {', '.join(map(repr, data))}")
            data = data[split]
        else:
            data = datasets.load_dataset(source, split=split)
    except Exception as error:  # each reader of `datasets` has its own exceptions
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{field_name}: {source!r} cannot be read ({reason})") from error
    rows = (row for part in data.with_format("arrow").iter(READ_ROWS) for row in part.to_pylist())
    return len(data), ((Where(source, "row", n), _there(row)) for n, row in enumerate(rows, start=1))


def _begins_an_array(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    except OSError:  # the reader reports it
        return False


def _array(field_name: str, path: Path) -> list[dict[str, Any]]:
    try:
        items = orjson.loads(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except (OSError, orjson.JSONDecodeError) as error:
        raise ValueError(f"{field_name}: {str(path)!r} cannot be read ({error})") from error
    for number, item in enumerate(items, start=1):
        if not isinstance(item, dict):
            raise ValueError(f"{field_name}: {path} row {number}: {type(item).__name__} found, an object is expected")
    found: list[dict[str, Any]] = items
    return found


def _num_lines(field_name: str, path: Path) -> int:
    """The number of non-blank lines."""
    if not path.is_file():
        raise ValueError(f"{field_name}: {str(path)!r} is not a file")
    try:
        with path.open("rb") as file:
            return sum(not line.isspace() for line in file)
    except OSError as error:
        raise ValueError(f"{field_name}: {str(path)!r} cannot be read ({error})") from error


def _jsonl_records(field_name: str, path: Path) -> Iterator[tuple[Where, dict[str, Any]]]:
    name = str(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            where = Where(name, "line", number)
            record = _parsed(f"{field_name}: {where}", line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
            yield where, {name: value for name, value in record.items() if value is not None}


def _parsed(where: str, line: bytes) -> dict[str, Any]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        # Stricter than Python's parser, which accepts lone surrogates and integers of any size.
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: cannot be read as UTF-8 text ({error})") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error.msg})") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: {type(record).__name__} found, an object is expected")
    return record


def _there(value: Any) -> Any:
    """`value` without nulls at any depth: in Arrow all structs of a column have the same fields."""
    if isinstance(value, dict):
        return {k: _there(v) for k, v in value.items() if v is not None}
    return [_there(v) for v in value] if isinstance(value, list) else value


def chat_pairs(conversation: Conversation, context: int | None) -> Iterator[tuple[Messages, dict[str, Any]]]:
    """Every turn but the first as a reply to the up to `context` turns before it (None: all)."""
    for i in range(1, len(conversation.turns)):
        before = conversation.turns[0 if context is None else max(0, i - context) : i]
        # Roles alternate, and both the first turn and the one before the reply are the user's.
        before = before[1 - len(before) % 2 :]
        prompt: Messages = [{"role": ("user", "assistant")[j % 2], "content": text} for j, text in enumerate(before)]
        yield prompt, {"role": "assistant", "content": conversation.turns[i]}
