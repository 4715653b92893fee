"""Values that the processes of a reply and of its tests exchange as JSON, never code.

Values are rebuilt as exactly None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset and dict, so that
no method of the other side runs here. An instance of a subclass is sent as its base (a Counter as a dict). Any other
object stays in its process, and its number is sent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

MAX_BYTES = 2**24
"""Limit of one message."""
JSON_INTEGERS = 2**63
"""Larger integers are sent in base 16: base 10 takes quadratic time, and Python limits its digits."""

Keep = Callable[[Any], list[Any]]
COLLECTIONS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, keep: Keep) -> Any:
    """`value` as JSON.

    Args:
        keep: object that is not a plain value → its replacement.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -JSON_INTEGERS < number < JSON_INTEGERS else ["int", hex(number)]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, dict):
        return ["dict", *([encode(key, keep), encode(held, keep)] for key, held in dict.items(value))]
    for tag, kind in COLLECTIONS.items():
        if isinstance(value, kind):
            # The base class's iterator: the value's own is code of the reply.
            return [tag, *(encode(held, keep) for held in kind.__iter__(value))]  # type: ignore[attr-defined]
    return keep(value)


def decode(data: Any, kept: Callable[[list[Any]], Any]) -> Any:
    """The value that `encode` encoded as `data`.

    Args:
        kept: replacement of an object → its value here.

    Raises:
        ValueError: `data` is not valid.
    """
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if not isinstance(data, list) or not data:
        raise ValueError("no value")
    tag, *rest = data
    try:
        if isinstance(tag, str) and tag in COLLECTIONS:
            return COLLECTIONS[tag](decode(held, kept) for held in rest)
        match tag:
            case "dict":
                return {decode(key, kept): decode(held, kept) for key, held in rest}
            case "int":
                return int(rest[0], 16)
            case "complex":
                return complex(float(rest[0]), float(rest[1]))
            case "bytes":
                return bytes.fromhex(rest[0])
            case "object":
                return kept(rest)
    except (TypeError, IndexError) as error:
        raise ValueError("no value") from error
    raise ValueError("no value")


class Channel:
    """Messages, one a line, over two pipes."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._in, self._out = incoming, outgoing
        self._read = b""

    def send(self, message: Any) -> None:
        """Write a message.

        Raises:
            OSError: the other side has closed the pipe.
            ValueError: it is longer than `MAX_BYTES`.
        """
        line = json.dumps(message).encode() + b"\n"
        if len(line) > MAX_BYTES:
            raise ValueError(f"a value of more than {MAX_BYTES} bytes cannot be sent")
        while line:
            line = line[os.write(self._out, line) :]

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: the other side has ended.
            ValueError: the message is not valid.
        """
        parts = [self._read]
        size = len(self._read)
        while b"\n" not in parts[-1]:
            part = os.read(self._in, 65536)
            if not part:
                raise EOFError
            size += len(part)
            if size > MAX_BYTES:
                raise ValueError(f"a message of more than {MAX_BYTES} bytes")
            parts.append(part)
        line, _, self._read = b"".join(parts).partition(b"\n")
        return json.loads(line)
