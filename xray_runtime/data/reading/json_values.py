"""One canonical value of a record, whichever container it was read from.

JSON and Arrow differ in what they can hold, so that one record could become several. The rules:

- A null member of an object is absent, at every depth: in Arrow all structs of a column have the same fields. Null
  elements of lists stay.
- A whole number is an int, however it was written (1, 1.0): Arrow makes a column with one fraction a column of floats.
  Integers of any size are exact.
- Below `const`, `default`, `enum` and `examples`, JSON Schema's keywords, null is a value. JSON files keep it. In Arrow
  it cannot be told from an absent one: it becomes `UNTOLD`, which is refused where it is used, as are dates, decimals
  and bytes.
- Objects with a key twice are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

EXACT = 2**53
"""Whole floats up to this are integers without doubt."""
DATA_KEYWORDS = frozenset(("const", "default", "enum", "examples"))
TYPES = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
}
"""Types of JSON values, as messages name them."""


@dataclass(frozen=True)
class Untold:
    """A value that its container does not tell; refused where it is used."""

    what: str


UNTOLD = Untold("null or absent")
ROUNDED = Untold("a rounded integer or another large number")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text, with exact integers. Raises ValueError: it is not JSON, not UTF-8, or an object has a
    key twice."""
    try:
        return DECODER.decode(text if isinstance(text, str) else text.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}: column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot be read as UTF-8 text ({error})") from error
    except RecursionError:
        raise ValueError("not read: its JSON is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"an object has the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return fields


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def canonical(value: Any, is_data: bool = False) -> Any:
    """A JSON value by the rules above. `is_data`: it is below one of `DATA_KEYWORDS`."""
    if isinstance(value, dict):
        values: dict[str, Any] = {}
        for key, member in value.items():
            if type(member) is str:
                values[key] = member
            elif member is not None or is_data or key in DATA_KEYWORDS:
                values[key] = canonical(member, is_data or key in DATA_KEYWORDS)
        return values
    if isinstance(value, list):
        return [canonical(element, is_data) for element in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT:
        return int(value)
    return value


def canonical_record(value: dict[str, Any]) -> dict[str, Any]:
    """A record from JSON by the rules above. Its own columns are no schema's keywords."""
    return {name: canonical(member) for name, member in value.items() if member is not None}


def without_nulls(value: Any) -> Any:
    """`value` without null members and `UNTOLD`, for messages and their calls, which are no schema."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None and v != UNTOLD}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def arrow_records(table: pa.Table | pa.RecordBatch, is_from_json: bool = False) -> Iterator[dict[str, Any]]:
    """The rows of a table by the rules above. Raises ValueError as `parse_json`, and where a map has a key twice.

    Args:
        is_from_json: Arrow's reader made the table of JSON, and floats of integers above 2^63.
    """
    names = table.schema.names
    if len(set(names)) < len(names):
        raise ValueError(f"two columns have the name {next(n for n in names if names.count(n) > 1)!r}")
    readers = {field.name: _reader(field.type, _unrounded if is_from_json else canonical) for field in table.schema}
    for row in table.to_pylist(maps_as_pydicts="strict"):
        yield {name: readers[name](value, False) for name, value in row.items() if value is not None}


Reader = Callable[[Any, bool], Any]
"""(a value of an Arrow type that is not null, whether it is below one of `DATA_KEYWORDS`) → its canonical value."""


def _unrounded(value: Any, is_data: bool) -> Any:
    return ROUNDED if isinstance(value, float) and value.is_integer() and abs(value) > EXACT else canonical(value)


def _reader(kind: pa.DataType, of_leaf: Reader) -> Reader:
    if isinstance(kind, pa.JsonType):
        return lambda value, is_data: canonical(parse_json(value), is_data)
    if pa.types.is_struct(kind):
        return _struct_reader(
            {kind.field(i).name: _reader(kind.field(i).type, of_leaf) for i in range(kind.num_fields)}
        )
    if pa.types.is_map(kind):
        of_item = _reader(kind.item_type, of_leaf)
        return lambda value, is_data: {k: None if v is None else of_item(v, is_data) for k, v in value.items()}
    if pa.types.is_nested(kind) and kind.num_fields == 1:
        of_element = _reader(kind.field(0).type, of_leaf)
        return lambda value, is_data: [None if v is None else of_element(v, is_data) for v in value]
    return of_leaf


def _struct_reader(readers: Mapping[str, Reader]) -> Reader:
    def read(value: dict[str, Any], is_data: bool) -> dict[str, Any]:
        values = {}
        for key, member in value.items():
            of_data = is_data or key in DATA_KEYWORDS
            if member is not None:
                values[key] = readers[key](member, of_data)
            elif of_data:
                values[key] = UNTOLD
        return values

    return read


def check_json(where: object, key: str, value: Any) -> Any:
    """`value` unchanged. Raises ValueError, with its place and type, if it is not a value of JSON."""
    if isinstance(value, dict):
        for name, member in value.items():
            if not isinstance(name, str):
                raise ValueError(f"{where}: {key} has the key {name!r} of type {type(name).__name__}; allowed: texts")
            check_json(where, f"{key}.{name}", member)
    elif isinstance(value, list):
        for number, element in enumerate(value):
            check_json(where, f"{key}.{number}", element)
    elif isinstance(value, Untold):
        raise ValueError(
            f"{where}: {key} is {value.what}, which its container does not tell: write {key.partition('.')[0]} as JSON "
            "text, or the rows as .jsonl"
        )
    elif value is not None and type(value) not in TYPES:
        raise ValueError(f"{where}: {key} is {type_of(value)}; allowed: what JSON has; write it as text or as a number")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: {key} is {value}; allowed: finite numbers")
    return value


def type_of(value: Any) -> str:
    """The type of a value for messages: `text`, `a list`, `datetime`."""
    if value is None:
        return "null"
    return TYPES.get(type(value), type(value).__name__)
