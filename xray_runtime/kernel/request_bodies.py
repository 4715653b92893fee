"""Bodies of requests from anybody, as JSON that everything behind can read: not too deep, and with text that UTF-8 can
write."""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 64
"""Levels of objects and lists; templates, schemas and Python recurse through them."""


def parse_body(body: bytes) -> Any:
    """The value of a body. Raises ValueError, in one line, if it is not allowed."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON ({' '.join(str(error).split())[:200]})") from error
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = _below(level)
        if not level:
            return value
    raise ValueError(f"the body is not allowed: it has more than {MAX_DEPTH} levels of objects and lists")


def _below(level: list[Any]) -> list[Any]:
    """Members of a level's objects and lists, after a look at its texts."""
    values: list[Any] = []
    for value in level:
        if isinstance(value, str):
            _check_text(value)
        elif isinstance(value, list):
            values += value
        elif isinstance(value, dict):
            values += value.keys()
            values += value.values()
    return values


def _check_text(text: str) -> None:
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        raise ValueError("the body is not allowed: a text has a lone surrogate, which is not a character") from None
