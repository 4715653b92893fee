"""What crosses between the process of a reply and that of its tests: values as JSON, never code.

Values are rebuilt from what was read as None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset and
dict exactly, so that no method of the other side runs here. An instance of a subclass crosses as what it is made of (a
Counter as a dict). Anything else stays where it is: its number crosses in its place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

MAX_BYTES = 2**24
"""Of one message."""
JSON_INTEGERS = 2**63
"""Larger ones cross in base 16: base 10 takes quadratic time, and Python limits its digits."""

Keep = Callable[[Any], list[Any]]


def encode(value: Any, keep: Keep) -> Any:
    """`value` as what JSON has.

    Args:
        keep: what stands for an object that is no plain value.
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
    if isinstance(value, list):
        return ["list", *(encode(held, keep) for held in list.__iter__(value))]
    if isinstance(value, tuple):
        return ["tuple", *(encode(held, keep) for held in tuple.__iter__(value))]
    if isinstance(value, set):
        return ["set", *(encode(held, keep) for held in set.__iter__(value))]
    if isinstance(value, frozenset):
        return ["frozenset", *(encode(held, keep) for held in frozenset.__iter__(value))]
    return keep(value)


def decode(data: Any, kept: Callable[[list[Any]], Any]) -> Any:
    """The value that `encode` made `data` of.

    Args:
        kept: what an object that did not cross is here.

    Raises:
        ValueError: `data` is nothing that `encode` makes.
    """
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if not isinstance(data, list) or not data:
        raise ValueError("no value")
    tag, *rest = data
    try:
        match tag:
            case "list":
                return [decode(held, kept) for held in rest]
            case "tuple":
                return tuple(decode(held, kept) for held in rest)
            case "set":
                return {decode(held, kept) for held in rest}
            case "frozenset":
                return frozenset(decode(held, kept) for held in rest)
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
            OSError: nobody reads.
            ValueError: it is longer than `MAX_BYTES`.
        """
        line = json.dumps(message).encode() + b"\n"
        if len(line) > MAX_BYTES:
            raise ValueError(f"a value of more than {MAX_BYTES} bytes cannot cross")
        while line:
            line = line[os.write(self._out, line) :]

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: the other side has ended.
            ValueError: what it wrote is no message.
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
