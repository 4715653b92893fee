"""The header of a .gguf file: what its model is called and measures, and how large its tensors are.

gguf's own reader makes arrays of every token of the tokenizer, which takes ten seconds for 49,000 of them.

    magic "GGUF", version u32, number of tensors u64, number of fields u64
    field    key, type u32, value: a scalar; a string; or a list: type of its items u32, their number u64, the items
    tensor   name, number of dimensions u32, dimensions u64 each, type u32, offset u64
    string   length u64, UTF-8
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, LIST = 8, 9
VERSIONS = (2, 3)


def read_gguf_header(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """(its fields that are no lists, tensor → number of elements).

    Raises ValueError: it is no .gguf file, of another version, or damaged; one line.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        return _Header(file, path.stat().st_size).read()


class _Header:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._order = "<"

    def read(self) -> tuple[dict[str, Any], dict[str, int]]:
        version = self._number("I")
        if version & 0xFFFF == 0:
            # Written for processors whose numbers begin with the largest byte.
            self._order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}; must be 2 or 3")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        fields = {self._string(): self._value(self._number("I")) for _ in range(num_fields)}
        return {key: value for key, value in fields.items() if value is not None}, dict(
            self._tensor() for _ in range(num_tensors)
        )

    def _bytes(self, length: int) -> bytes:
        content = self._file.read(length) if length <= self._size else b""
        if len(content) != length:
            raise ValueError("its header ends early")
        return content

    def _number(self, code: str) -> Any:
        return struct.unpack(self._order + code, self._bytes(struct.calcsize(self._order + code)))[0]

    def _string(self) -> str:
        return self._bytes(self._number("Q")).decode()

    def _value(self, kind: int) -> Any:
        """None for a list."""
        if kind == STRING:
            return self._string()
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind != LIST:
            raise ValueError(f"its header has a field of the unknown type {kind}")
        kind, length = self._number("I"), self._number("Q")
        if kind in SCALARS:
            self._bytes(length * struct.calcsize(self._order + SCALARS[kind]))
        elif kind == STRING:
            for _ in range(length):
                self._bytes(self._number("Q"))
        else:
            raise ValueError(f"its header has a list of the type {kind}")
        return None

    def _tensor(self) -> tuple[str, int]:
        name, size = self._string(), 1
        for _ in range(self._number("I")):
            size *= self._number("Q")
        self._number("I")
        self._number("Q")
        return name, size
