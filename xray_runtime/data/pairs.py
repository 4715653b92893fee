"""The two record types of X-ray's datasets and their files.

A prompt is a list of messages, `{"role": "system" | "user" | "assistant", "content": str}`, the last one the user's.
Files are JSON Lines: one record a line, in a fixed field order, so equal data are equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Example:
    """A prompt and the reply a person gave."""

    id: str
    conversation: str
    prompt: Messages
    response: str


@dataclass(frozen=True)
class PreferenceExample:
    """A prompt and two replies, one preferred."""

    id: str
    prompt: Messages
    chosen: str
    rejected: str


def write_jsonl(path: Path, records: Iterable[Example | PreferenceExample]) -> int:
    """Write records; returns how many."""
    count = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for record in records:
            file.write(json.dumps(vars(record), ensure_ascii=False) + "\n")
            count += 1
    return count


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def read_examples(path: Path) -> list[Example]:
    """The prompt/reply pairs of a file that `write_jsonl` wrote."""
    return [Example(**record) for record in _lines(path)]


def read_preferences(path: Path) -> list[PreferenceExample]:
    """The preference pairs of a file that `write_jsonl` wrote."""
    return [PreferenceExample(**record) for record in _lines(path)]


def prompt_text(prompt: Messages) -> str:
    """What a prompt says, without roles: the key by which equal prompts are recognized, and what people are shown."""
    return "\n".join(message["content"] for message in prompt)
