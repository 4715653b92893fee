"""Help texts of stage kinds: for `help(xray.sft)`, for the type checkers' stub, and for the site.

Bodies are parsed, not imported, because they import torch.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

from pydantic import BaseModel

from xray_runtime.kernel.config.section import field_meaning

USES: tuple[str, ...] = ()
WIDTH = 100
BOUNDS = {"minimum": "≥ ", "exclusiveMinimum": "> ", "maximum": "≤ ", "exclusiveMaximum": "< "}
BOUNDS |= {"minItems": "at least ", "maxItems": "at most "}
NAMES = {"integer": "whole number", "string": "text", "boolean": "true or false", "null": "null"}
REQUIRED = "required"


class DescribedRole(Protocol):
    """One input (`kind.Role`)."""

    @property
    def type(self) -> type[Any]: ...

    @property
    def optional(self) -> bool: ...

    @property
    def many(self) -> bool: ...


class DescribedKind(Protocol):
    """A stage kind (`kind.StageKind`)."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> Any: ...

    @property
    def inputs(self) -> type[Any]: ...

    @property
    def output(self) -> type[Any]: ...

    @property
    def body(self) -> str | Callable[..., int]: ...

    @property
    def module(self) -> str: ...

    @property
    def sections(self) -> list[type[BaseModel]]: ...

    @property
    def roles(self) -> Mapping[str, DescribedRole]: ...


@dataclass(frozen=True)
class FieldHelp:
    """Help on one field of a section."""

    name: str
    allowed: str
    """Types and bounds."""
    default: str
    """JSON, `REQUIRED`, or a phrase."""
    meaning: str


class KindAttribute:
    """A lazy attribute of a kind; on the class `StageKind` it is `class_value`."""

    def __init__(self, compute: Callable[[DescribedKind], Any], class_value: Any) -> None:
        self._compute, self._class_value = compute, class_value

    def __get__(self, kind: DescribedKind | None, owner: type[Any]) -> Any:
        return self._class_value if kind is None else self._compute(kind)


def help_text(kind: DescribedKind) -> str:
    """Signature, summary, inputs and fields of a kind, for `help()`."""
    inputs = [f"{name}=None" if role.optional else name for name, role in kind.roles.items()]
    call = f"xray.{kind.name}({', '.join([*inputs, '*', 'name=None', '**fields'])})"
    return f"{call}\n\n{description(kind, kind.sections)}"


def description(kind: DescribedKind, sections: Sequence[type[BaseModel]]) -> str:
    """Summary and inputs of a kind, and the fields of these sections of its config."""
    lines = textwrap.wrap(summary(kind), WIDTH)
    about = meanings(kind.inputs)
    if kind.roles:
        lines += ["", "Inputs, in this order or by name:"]
        for name, role in kind.roles.items():
            lines += _entry(name, role_text(role, role.type.__name__), about.get(name, ""))
    for section in sections:
        chosen = tag(kind.config, section)
        lines += ["", f"Fields with {chosen[0]}={chosen[1]!r}, by name:" if chosen else "Fields, by name:"]
        for field in field_help(section):
            default = field.default if field.default == REQUIRED else f"default {field.default}"
            lines += _entry(field.name, f"{field.allowed}; {default}", field.meaning)
    lines += ["", "name: name of the stage; by default the kind's, with a number if that is taken."]
    return "\n".join([*lines, f"Returns a handle: {kind.output.__name__}."])


def _entry(name: str, allowed: str, meaning: str) -> list[str]:
    head = textwrap.wrap(f"{name}: {allowed}", WIDTH, initial_indent="  ", subsequent_indent="      ")
    return head + textwrap.wrap(meaning, WIDTH, initial_indent="      ", subsequent_indent="      ")


def signature(kind: DescribedKind) -> inspect.Signature:
    """Inputs, then the fields of every section as keywords."""
    parameters = [
        inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None if role.optional else inspect.Parameter.empty
        )
        for name, role in kind.roles.items()
    ]
    keywords: dict[str, Any] = {"name": None}
    for section in kind.sections:
        for name, field in section.model_fields.items():
            default = inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)
            keywords.setdefault(name, default)
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in keywords.items()
        if name not in kind.roles
    ]
    return inspect.Signature(parameters)


def summary(kind: DescribedKind) -> str:
    """A kind's purpose and output, from the docstrings of its body and of the body's module."""
    if not isinstance(kind.body, str):
        return " ".join((inspect.getdoc(kind.body) or "").split())
    spec = importlib.util.find_spec(kind.module)
    if spec is None or spec.origin is None:
        return ""
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    about = (ast.get_docstring(tree) or "").partition("\n")[0].partition(": ")[2]
    name = kind.body.partition(":")[2]
    body = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    writes = " ".join((ast.get_docstring(body) or "").partition("\n\n")[0].split())
    return f"{about[:1].upper()}{about[1:]} {writes}".strip()


def meanings(owner: type[Any]) -> dict[str, str]:
    """Attribute → the string below it."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    except (OSError, TypeError, SyntaxError):  # a class from an interactive session has no source
        return {}
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            texts[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return texts


def role_text(role: DescribedRole, type: str) -> str:
    """Allowed inputs of a role; `type`: the type's displayed name."""
    return f"any number of {type}" if role.many else f"{type}, optional" if role.optional else type


def tag(config: object, section: type[BaseModel]) -> tuple[str, Any] | None:
    """(field, value) that selects a section of a union; None if there is no union."""
    if isinstance(config, type):
        return None
    field = get_args(config)[1].discriminator
    return field, section.model_fields[field].default


def field_help(section: type[BaseModel], link: Callable[[str], str] = str) -> Iterator[FieldHelp]:
    """Every field of a section.

    Args:
        link: formats the name of another section.
    """
    schema = section.model_json_schema()
    properties, required = schema.get("properties", {}), schema.get("required", [])
    for name, field in properties.items():
        default = REQUIRED if name in required else _default(field)
        yield FieldHelp(name, _allowed(field, link), default, meaning(section, name))


def meaning(section: type[BaseModel], field: str) -> str:
    """A field's description, inherited from a base section if the section only overrides the default."""
    classes = [c for c in section.__mro__ if issubclass(c, BaseModel) and field in c.model_fields]
    texts = (c.model_fields[field].description or field_meaning(c, field) for c in classes)
    description = next(filter(None, texts), "")
    return " ".join(description.split())


def _allowed(schema: Mapping[str, Any], link: Callable[[str], str]) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        return link(schema["$ref"].rpartition("/")[2])
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return " or ".join(dict.fromkeys(_allowed(choice, link) for choice in choices))
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    bounds = ", ".join(f"{sign}{schema[key]}" for key, sign in BOUNDS.items() if key in schema)
    kind = schema.get("type", "anything")
    if kind == "array":
        items = schema.get("items")
        kind = f"list of {_allowed(items, link)}" if items else "list of numbers"
    elif kind == "object":
        values = schema.get("additionalProperties")
        kind = f"mapping to {_allowed(values, link)}" if isinstance(values, dict) else "mapping"
    pattern = f"matches `{schema['pattern']}`" if "pattern" in schema else ""
    filled = "not empty" if schema.get("minLength") else ""
    return ", ".join(part for part in (NAMES.get(kind, kind), filled, bounds, pattern) if part)


def _default(schema: Mapping[str, Any]) -> str:
    if "default" not in schema:
        return "empty"
    value = schema["default"]
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value)):
        return "its own defaults"
    return f"`{json.dumps(value, ensure_ascii=False)}`"
