"""Fields of nested data by dotted paths."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

from xray_runtime.kernel.config.validation import ConfigError


def section(data: Any, path: str) -> Any:
    """The value at a dotted path; the data itself for an empty path."""
    keys = path.split(".") if path else []
    return reduce(lambda node, key: node[int(key) if isinstance(node, list) else key], keys, data)


def put(
    data: dict[str, Any], path: str, value: Any, what: str, default: Callable[[list[str]], Any] = lambda keys: {}
) -> None:
    """Set the field at a dotted `path` of a config's data.

    Args:
        default: returns the value at a path's keys if the data has none.

    Raises:
        ConfigError: there is no such field; the line begins with `what`.
    """
    keys = path.strip().split(".")
    node: Any = data
    for depth, key in enumerate(keys):
        here = ".".join(keys[:depth]) or "the config"
        last = depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                raise ConfigError(f"{what}: {key} is not allowed: {here} has items 0 to {len(node) - 1}")
            if last:
                node[int(key)] = value
            elif node[int(key)] is None:
                node[int(key)] = {}
            node = node[int(key)]
        elif isinstance(node, dict):
            if last:
                node[key] = value
            elif node.get(key) is None:
                node[key] = default(keys[: depth + 1])
            node = node[key]
        else:
            raise ConfigError(f"{what}: {here} is {kind_of(node)} and has no field {key!r}")


def kind_of(value: Any) -> str:
    """The type of a value, for error messages."""
    names = {dict: "a mapping", list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "nothing" if value is None else type(value).__name__)
