"""The keys of records and of their messages that mean something somewhere: each is read, or refused by row and key.

What a form reads is in `records.FORMS`, what a message has in `messages.READ`. All other keys are counted by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from xray_runtime.data.reading.json_values import type_of
from xray_runtime.kernel.errors import shown

LEARNED = ("weight", "train", "trainable", "training", "loss", "loss_mask", "loss_weight", "learn", "calculate_loss")
"""Whether a message or a record is learned: 0, 1, false or true."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the assistant's reasoning before a reply."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
MEDIA_FILES = (
    *(".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".wav", ".mp3", ".flac", ".ogg", ".mp4", ".mkv", ".webm", ".avi", ".mov"),
)
BY_OTHER_NAMES = ("response", "reply", "output", "assistant", "chosen", "rejected")
"""Columns that would be a reply beside a prompt alone."""

_NO_MEDIA = "pictures, sounds and videos are not read; remove such rows"
_NO_TOKENS = "masks and labels of tokens are not read; give messages, with weight 0 where nothing is to be learned"
REFUSED_COLUMNS: Mapping[str, str] = {
    **dict.fromkeys(MEDIA, _NO_MEDIA),
    **dict.fromkeys(("labels", "completion_mask", "assistant_masks"), _NO_TOKENS),
    "functions": "OpenAI's old form of tools; give them as tools",
    "system_prompt": "rename it to system",
    "history": "it is read with instruction and output only",
    "reasoning": "name the reply's reasoning reasoning_content",
    "thinking": "name the reply's reasoning reasoning_content",
    "margin": "margins of preferences are not used; drop the column",
    "chat_template_kwargs": "all rows have the same chat template and the same arguments; drop the column",
}
"""Column → what to do instead. An empty value means nothing and is allowed."""
REFUSED_KEYS: Mapping[str, str] = {
    **dict.fromkeys(MEDIA, _NO_MEDIA),
    "function_call": "OpenAI's old form of a call; tool_calls is expected",
    "functions": "OpenAI's old form of tools; give them as tools of the record",
    "refusal": "give the refusal as content",
    "reasoning_details": "give the reasoning as text, in reasoning_content",
    "train_detail": "parts of a message cannot be left out; split it, or set train",
    "prefix": "replies that are begun are not read; give the whole reply",
    "partial": "replies that are begun are not read; give the whole reply",
}
"""Key of a message → what to do instead."""
NEUTRAL: Mapping[str, str] = {"channel": "final", "recipient": "all"}
"""Keys of Harmony's messages → the one value that changes nothing."""
MAX_NAMES = 100
NUM_SHOWN = 10
OTHERS = "(other names)"


@dataclass
class Unread:
    """Number of keys that were not read, by name."""

    columns: Counter[str] = field(default_factory=Counter)
    message_keys: Counter[str] = field(default_factory=Counter)

    def add_columns(self, names: Iterable[str]) -> None:
        _add(self.columns, names)

    def add_message_keys(self, names: Iterable[str]) -> None:
        _add(self.message_keys, names)

    def counts(self) -> dict[str, dict[str, int]]:
        """For stats.json; empty if everything was read."""
        counts = {"columns_not_read": self.columns, "message_keys_not_read": self.message_keys}
        return {what: dict(sorted(names.items())) for what, names in counts.items() if names}

    def metrics(self, group: str) -> dict[str, float]:
        """The most frequent ones as metrics `GROUP/columns_not_read/NAME`."""
        return {
            f"{group}/{what}/{_metric_name(name)}": float(count)
            for what, names in self.counts().items()
            for name, count in Counter(names).most_common(NUM_SHOWN)
        }

    def __str__(self) -> str:
        lists = (f"{what.replace('_', ' ')}: {_listed(names)}" for what, names in self.counts().items())
        return "; ".join(lists)


def _add(counts: Counter[str], names: Iterable[str]) -> None:
    for name in names:
        counts[name if name in counts or len(counts) < MAX_NAMES else OTHERS] += 1


def _listed(names: Mapping[str, int]) -> str:
    most = Counter(names).most_common(NUM_SHOWN)
    more = [f"{len(names) - NUM_SHOWN} more"] if len(names) > NUM_SHOWN else []
    return ", ".join([*(f"{name} {count:,}" for name, count in most), *more])


def _metric_name(name: str) -> str:
    """The name with the characters that MLflow allows."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-. ") else "_" for c in name)[:80]


def refuse_keys(where: object, record: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    """Raises ValueError, with the key, if a key that is refused has a value."""
    for name, instead in refused.items():
        if record.get(name):
            raise ValueError(f"{where}: {name} ({type_of(record[name])}) is not supported: {instead}")


def refuse_columns(where: object, record: Mapping[str, Any], read: Iterable[str] = ()) -> None:
    """`refuse_keys` for the columns of a record, without those that its form reads; and for pictures and sounds of
    `datasets` in any column."""
    refused = {name: instead for name, instead in REFUSED_COLUMNS.items() if name not in read}
    refused |= {name: _NO_MEDIA for name, value in record.items() if _is_media(value)}
    try:
        refuse_keys(where, record, refused)
    except ValueError as error:
        raise ValueError(f"{error}; {RENAME}") from None


def _is_media(value: Any) -> bool:
    """Whether it is an `Image`, `Audio` or `Video` of `datasets`, or a list of them."""
    first = value[0] if isinstance(value, list) and value else value
    if not isinstance(first, dict) or not first or not first.keys() <= {"bytes", "path"}:
        return False
    return "bytes" in first or str(first["path"]).lower().endswith(MEDIA_FILES)


RENAME = "if it means something else, rename the column (rename_columns)"


def is_learned(where: object, given: Mapping[str, Any]) -> bool | None:
    """The value of the keys `LEARNED`; None: there is none. Raises ValueError if one has another value than 0 and 1, or
    two disagree."""
    flags = {name: given[name] for name in LEARNED if given.get(name) is not None}
    for name, value in flags.items():
        if not isinstance(value, int) or value not in (0, 1):
            raise ValueError(f"{where}: {name} is {shown(value)} ({type_of(value)}); allowed: 0, 1, false, true")
    if len(set(flags.values())) > 1:
        raise ValueError(f"{where}: {' and '.join(flags)} disagree: {shown(flags)}")
    return bool(next(iter(flags.values()))) if flags else None


def is_desirable(where: object, record: Mapping[str, Any]) -> bool:
    """KTO's label of a reply. Raises ValueError if it is no label."""
    label = record.get("label", True)
    if not isinstance(label, int) or label not in (0, 1):
        raise ValueError(
            f"{where}: label is {shown(label)} ({type_of(label)}); allowed: true and false, whether the reply is good; "
            f"{RENAME}"
        )
    return bool(label)
