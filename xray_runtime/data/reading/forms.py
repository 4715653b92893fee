"""The forms of records, by their columns, and their conversion to the standard ones.

`FORMS` maps columns to forms. Other projects' forms are converted to the standard ones: TRL's `messages`, `prompt` +
`completion`, `prompt` + `chosen` + `rejected` (each a string or a list of messages), transcripts of HH-RLHF in
`chosen` + `rejected`, and `prompt` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from xray_runtime.data.reading.json_values import type_of
from xray_runtime.data.reading.keys import BY_OTHER_NAMES, LEARNED, REFUSED_COLUMNS, Unread, refuse_columns
from xray_runtime.data.reading.pictures import StoredPicture

Record = dict[str, Any]
ALWAYS = ("tools", "system", "conversation_id", "label", "reasoning_content", *LEARNED)
"""Columns that every form with a reply reads."""
WITHOUT_REPLY = ("tools", "system", "conversation_id", *LEARNED)
"""Columns that a prompt alone has; `label` is then an answer."""


class Form(NamedTuple):
    """A form of records."""

    columns: tuple[str, ...]
    """Columns that a record must have."""
    name: str = ""
    """The origin of the form, if its columns do not name it."""
    usual: Callable[[object, Record], Record] = lambda where, record: record
    """Converts a record to a standard form."""
    optional: tuple[str, ...] = ALWAYS
    """Columns that a record may have."""

    def __str__(self) -> str:
        return " + ".join(self.columns) + (f" ({self.name})" if self.name else "")


def _alpaca_prompt(where: object, record: Record) -> list[Record]:
    """The messages before the output."""
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise ValueError(f"{where}: history must be a list of [instruction, output] pairs, not {type_of(history)}")
    parts = []
    for number, turn in enumerate(history, start=1):
        for role, text in zip(("user", "assistant"), turn, strict=True):
            if not isinstance(text, str):
                raise ValueError(f"{where}: history: pair {number} has {type_of(text)}; allowed: two texts")
            parts.append({"role": role, "content": text})
    given = [record["instruction"], *([record["input"]] if record.get("input") else [])]
    if not all(isinstance(part, str) for part in given):
        types = " and ".join(map(type_of, given))
        raise ValueError(f"{where}: instruction and input must be strings, not {types}")
    return [*parts, {"role": "user", "content": "\n\n".join(given)}]


def _from_alpaca(where: object, record: Record) -> Record:
    reply = {"role": "assistant", "content": record["output"], "reasoning_content": record.get("reasoning_content")}
    return record | {"messages": [*_alpaca_prompt(where, record), reply], "reasoning_content": None}


def _from_sharegpt_preference(where: object, record: Record) -> Record:
    replies = {
        name: [record[name]] if isinstance(record[name], dict) else record[name] for name in ("chosen", "rejected")
    }
    return record | {"prompt": record["conversations"]} | replies


_ALPACA = (*ALWAYS, "input", "history")
PREFERENCES = (
    Form(("prompt", "chosen", "rejected")),
    Form(("conversations", "chosen", "rejected"), "ShareGPT", _from_sharegpt_preference),
    Form(
        ("instruction", "chosen", "rejected"),
        "Alpaca",
        lambda where, record: record | {"prompt": _alpaca_prompt(where, record)},
        _ALPACA,
    ),
    Form(("chosen", "rejected"), "HH-RLHF, or messages that begin alike"),
)
"""Forms with two replies; the first that fits is used."""
FORMS = (
    Form(("messages",)),
    *PREFERENCES[1:3],
    Form(("conversations",), "ShareGPT", lambda where, record: record | {"messages": record["conversations"]}),
    Form(("instruction", "output"), "Alpaca", _from_alpaca, _ALPACA),
    Form(("prompt", "completion")),
    PREFERENCES[0],
    PREFERENCES[3],
    Form(("prompt",), "without a reply", optional=WITHOUT_REPLY),
)
"""Forms of conversations; the first that fits is used. From two replies the chosen one is read."""


def usual(
    where: object,
    record: Record,
    forms: tuple[Form, ...] = FORMS,
    carried: Collection[str] = (),
    unread: Unread | None = None,
) -> Record:
    """`record` in a standard form, with the columns of its form alone.

    Args:
        carried: further columns that are used.
        unread: counts the columns that are not read.

    Raises:
        ValueError: its columns match no form, or one means something that is not supported.
    """
    form = next((form for form in forms if all(column in record for column in form.columns)), None)
    alone = form is not None and form.optional is WITHOUT_REPLY
    replies = [name for name in BY_OTHER_NAMES if alone and name in record and name not in carried]
    if form is None or replies:
        raise ValueError(
            f"{where}: the columns {', '.join(map(repr, sorted(record))) or '(none)'} match no supported form: "
            f"{'; '.join(map(str, forms))}; other names can be mapped with rename_columns{_hint(record, replies)}"
        )
    read = {*form.columns, *form.optional}
    if all(isinstance(one, StoredPicture) for one in record.get("images", [None])):
        read.add("images")
    refuse_columns(where, record, read)
    if unread is not None:
        unread.add_columns(record.keys() - read - REFUSED_COLUMNS.keys() - set(carried))
    read_as = form.usual(where, {name: value for name, value in record.items() if name in read})
    return {name: value for name, value in read_as.items() if name not in form.columns or name in STANDARD}


STANDARD = ("messages", "prompt", "completion", "chosen", "rejected")


def _hint(record: Record, replies: list[str]) -> str:
    if replies:
        return f": {{{replies[0]}: completion}} where {replies[0]} is the reply"
    if "text" in record:
        return "; text alone, as for pretraining, is not read: give prompts and replies"
    names = {name.lower(): name for name in record if name != name.lower()}
    column = next((names[c] for form in FORMS for c in form.columns if c in names), None)
    return f": {{{column}: {column.lower()}}}" if column else ""


def renamed(field: str, where: object, record: Record, names: Mapping[str, str], absent: set[str]) -> Record:
    """`record` with other names of columns.

    Args:
        names: name in the source → new name.
        absent: names of the source that were in no record yet; reduced.

    Raises:
        ValueError: the record has a column of the new name already.
    """
    if not names:
        return record
    absent.difference_update(record)
    taken = next((new for old, new in names.items() if old in record and new in record and new not in names), None)
    if taken is not None:
        raise ValueError(f"{field}: {where} has a column {taken!r} already: rename that one, too")
    return {names.get(name, name): value for name, value in record.items()}
