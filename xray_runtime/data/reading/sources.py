"""Sources of records: the chitchat corpus, files, and `datasets` names and directories."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xray_runtime.data.pairs import Messages
from xray_runtime.data.reading.record_files import (
    NAMED,
    READ_ROWS,
    Records,
    all_records,
    file_format,
    file_records,
    table_records,
)

OTHER_FILES = (
    *(".csv", ".tsv", ".txt", ".arrow", ".feather", ".yaml", ".ndjson", ".pkl"),
    *(".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz"),
)
"""File endings, which distinguish files from names on a hub."""

CHITCHAT = "chitchat"
"""The source that the chitchat-dataset package carries."""
CHITCHAT_SIZE = 7168
"""Its conversations."""


@dataclass(frozen=True)
class RatedConversation:
    """A conversation as alternating turns, with a participant's rating if there is one."""

    id: str
    turns: list[str]
    ratings: dict[str, int] = field(default_factory=dict)
    """witty, interesting, upbeat, each 1 to 10."""


def chitchat_conversations() -> Iterator[RatedConversation]:
    """The conversations of the chitchat-dataset package, consecutive messages of one person merged.

    Each is parsed when it is reached: few stages read all of the 40 MB.
    """
    spec = importlib.util.find_spec("chitchat_dataset")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("data.source: 'chitchat' needs the package chitchat-dataset")
    content = (Path(spec.submodule_search_locations[0]) / "dataset.json").read_text(encoding="utf-8")
    for key, conversation in _members(content):
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
        yield RatedConversation(key, turns, ratings)


def _members(text: str) -> Iterator[tuple[str, Any]]:
    """The members of a JSON object that `json.dumps` wrote, one after the other."""
    decode, at = json.JSONDecoder().raw_decode, 1
    while text[at] != "}":
        key, at = decode(text, at)
        value, at = decode(text, at + len(": "))
        yield key, value
        at += len(", ") if text[at] == "," else 0


def read_records(field_name: str, source: str, split: str) -> tuple[int, Records]:
    """(number of records, the records) of a .jsonl, .json or .parquet file, or of a `datasets` name or directory.

    A record is (position, columns), canonical as in `json_values`: the same from every container. One record is in
    memory at a time; of tables `READ_ROWS`, of a .json array all.

    Raises:
        ValueError: the source does not exist or cannot be read; one line that names `field_name`. A damaged line of a
            .jsonl file raises when it is reached.
    """
    path = Path(source)
    if file_format(path) is not None and not path.is_dir():
        return file_records(field_name, path)
    like_a_path = path.is_absolute() or source.startswith(".") or path.suffix in OTHER_FILES
    if like_a_path and not path.is_dir():
        # Requests to the hub for a path would only spend the time of their retries.
        what = "cannot be read" if path.exists() else "does not exist"
        raise ValueError(f"{field_name}: {source!r} {what}: must be a {NAMED}, a directory, or a name of `datasets`")
    try:
        files = _files_of(path, source, split)
        if files is None:
            data, is_from_json = _table(path, source, split)
            parts = data.with_format("arrow").iter(READ_ROWS)
            return len(data), table_records(field_name, source, parts, is_from_json)
    except Exception as error:  # each reader of `datasets` has its own exceptions
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{field_name}: {source!r} cannot be read ({reason})") from error
    return all_records(field_name, files)


def _is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _files_of(path: Path, source: str, split: str) -> list[Path] | None:
    """The files of a split of a directory that all are of `FORMATS`; None: `datasets` must read it.

    `datasets` would make dates of texts and floats of large integers in JSON.
    """
    if not path.is_dir() or _is_saved(path):
        return None
    import datasets

    config = datasets.load_dataset_builder(source).config
    files = {str(name): [Path(file) for file in paths] for name, paths in (config.data_files or {}).items()}
    if getattr(config, "field", None) or any(file_format(file) is None for one in files.values() for file in one):
        return None
    if split not in files and split.isidentifier():
        raise ValueError(f"no split {split!r}; there are {', '.join(map(repr, files))}")
    return files.get(split)


def _table(path: Path, source: str, split: str) -> tuple[Any, bool]:
    """(a set of `datasets`, whether it was made of JSON)."""
    import datasets

    if not _is_saved(path):
        data = datasets.load_dataset(source, split=split)
        return data, data.info.builder_name == "json"
    data = datasets.load_from_disk(source)
    if isinstance(data, dict):
        if split not in data:
            raise ValueError(f"no split {split!r}; there are {', '.join(map(repr, data))}")
        data = data[split]
    return data, data.info.builder_name == "json"


def chat_pairs(conversation: RatedConversation, context: int | None) -> Iterator[tuple[Messages, dict[str, Any]]]:
    """Every turn but the first as a reply to the up to `context` turns before it (None: all)."""
    for i in range(1, len(conversation.turns)):
        before = conversation.turns[0 if context is None else max(0, i - context) : i]
        # Roles alternate, and both the first turn and the one before the reply are the user's.
        before = before[1 - len(before) % 2 :]
        prompt: Messages = [{"role": ("user", "assistant")[j % 2], "content": text} for j, text in enumerate(before)]
        yield prompt, {"role": "assistant", "content": conversation.turns[i]}
