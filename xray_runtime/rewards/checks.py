"""The checks of verifiers: pure functions that return 1 or 0 for a reply. `worker` calls them in a process."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from math import isfinite
from typing import Any

from xray_runtime.rewards.answers import read_gold, right

NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:(?<=\d)\.?|\.\d+)(?:[eE][-+]?\d+)?")
FENCE = re.compile(
    r"^[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[\w+.-]*)[^\n`]*\n(?P<content>.*?)(?:^[ \t]*(?P=fence)|\Z)",
    re.DOTALL | re.MULTILINE,
)
PYTHON = ("python", "python3", "py")


def last_block(reply: str, *languages: str) -> str:
    """The last fenced block of a reply: of those named one of `languages`, or else of those without a name, or else of
    all. The reply if there is none."""
    found = [(block["language"].lower(), block["content"]) for block in FENCE.finditer(reply)]
    named, unnamed = ([text for name, text in found if name in names] for names in (languages, ("",)))
    blocks = named or unnamed or [text for _, text in found]
    return blocks[-1] if blocks else reply.strip()


def math(reply: str, answer: Any) -> float:
    r"""Whether the reply's final answer equals `answer`: a number, LaTeX or a text, or a solution with `####` or a box.

    The reply's answer is what it boxes, else what follows its last `####` or "answer is", else its last formula or
    number. `1, 2`, `1 or 2` and `\{2, 1\}` are equal, `(1, 2)` and `(2, 1)` are not; `x=5` equals 5; `50\%` equals 50
    and 0.5; units count where both have one; `101_2` needs its base; a decimal equals 1/3 or π in six digits.

    Raises:
        ValueError: `answer` is not read whole.
    """
    return float(right(reply, read_gold(answer)))


def math_gold(answer: Any) -> None:
    """Raises ValueError if `math` cannot read `answer` whole."""
    read_gold(answer)


def regex(reply: str, pattern: str, answer: Any) -> float:
    """Whether `pattern` is found and, if there is an answer, whether the last match (its first group) equals it: a text
    as text, a number as a number (7 equals "7.0").

    Raises:
        ValueError: the answer is neither.
    """
    regex_gold(answer)
    matches = list(re.finditer(pattern, reply))
    if not matches or answer is None:
        return float(bool(matches))
    last = matches[-1]
    matched = (last.group(1 if last.re.groups else 0) or "").strip()
    if isinstance(answer, str):
        return float(matched == answer.strip())
    number = NUMBER.fullmatch(matched)
    return float(number is not None and Decimal(matched.replace(",", "")) == Decimal(str(answer)))


def regex_gold(answer: Any) -> None:
    """Raises ValueError if `regex` cannot compare with `answer`."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
        raise ValueError(f"must be a text or a number, not {type(answer).__name__}")
    if isinstance(answer, float) and not isfinite(answer):
        raise ValueError("must be finite")


def json_schema(reply: str, schema: Any) -> float:
    """Whether the reply's JSON is valid under `schema`, an object, true or false, or its JSON text.

    Raises:
        ValueError: `schema` is not a JSON Schema.
    """
    import referencing

    schema = _schema(schema)
    try:
        value = json.loads(last_block(reply, "json"), parse_constant=_no_json)
    except ValueError:
        return 0.0
    # An empty registry, so that references are not downloaded.
    return float(_validator(schema)(schema, registry=referencing.Registry()).is_valid(value))


def json_schema_gold(schema: Any) -> None:
    """Raises ValueError if `schema` is not a JSON Schema."""
    _schema(schema)


def _schema(schema: Any) -> Any:
    import jsonschema

    try:
        schema = json.loads(schema, parse_constant=_no_json) if isinstance(schema, str) else schema
    except ValueError as error:
        raise ValueError(f"not a JSON Schema (not JSON: {error})") from None
    if not isinstance(schema, dict | bool):
        raise ValueError(f"not a JSON Schema (an object, or true or false, not {type(schema).__name__})")
    try:
        _validator(schema).check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"not a JSON Schema ({error.message})") from error
    return schema


def _validator(schema: Any) -> Any:
    import jsonschema

    return jsonschema.validators.validator_for(schema)


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
