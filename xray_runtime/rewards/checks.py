"""The checks of verifiers: pure functions that return 1 or 0 for a reply. `worker` calls them in a process."""

from __future__ import annotations

import json
import re
from typing import Any

FENCE = re.compile(r"```[\w+-]*[ \t]*\n(.*?)```", re.DOTALL)


def last_block(reply: str) -> str:
    """The last fenced block of a reply, or the reply if there is none."""
    blocks = FENCE.findall(reply)
    return str(blocks[-1]) if blocks else reply.strip()


def math(reply: str, answer: Any) -> float:
    """Whether the reply's final answer equals `answer` (a number, an expression, LaTeX), by math-verify.

    Raises:
        ValueError: `answer` cannot be read.
    """
    from math_verify import parse, verify

    # Its own time limits need a main thread; here the caller kills the process.
    text = str(answer)
    expected = parse(text, parsing_timeout=None) or parse(f"${text}$", parsing_timeout=None)
    if not expected:
        raise ValueError(f"{text[:100]!r} cannot be read as mathematics")
    return float(verify(expected, parse(reply, parsing_timeout=None), timeout_seconds=None))


def regex(reply: str, pattern: str, answer: Any) -> float:
    """Whether `pattern` is found and, if there is an answer, whether the last match (its first group) equals it."""
    matches = list(re.finditer(pattern, reply))
    if not matches or answer is None:
        return float(bool(matches))
    last = matches[-1]
    return float((last.group(1 if last.re.groups else 0) or "").strip() == str(answer).strip())


def json_schema(reply: str, schema: Any) -> float:
    """Whether the reply's JSON is valid under `schema`, an object or its JSON text.

    Raises:
        ValueError: `schema` is not a JSON Schema.
    """
    import jsonschema
    import referencing

    schema = json.loads(schema) if isinstance(schema, str) else schema
    validator = jsonschema.validators.validator_for(schema)
    try:
        validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"not a JSON Schema ({error.message})") from error
    try:
        value = json.loads(last_block(reply), parse_constant=_no_json)
    except ValueError:
        return 0.0
    # An empty registry, so that references are not downloaded.
    return float(validator(schema, registry=referencing.Registry()).is_valid(value))


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
