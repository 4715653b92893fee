"""Config from files and overrides: every mistake is one line that names the field, the value and what is allowed."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from xray_runtime.config.lifecycle import LifecycleConfig

Model = TypeVar("Model", bound=BaseModel)


class ConfigError(ValueError):
    """A config that cannot be used; the message is one line."""


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: 1e-4 is a number, only true and false are booleans, no key twice, no aliases."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            event = self.peek_event()
            raise yaml.constructor.ConstructorError(None, None, "aliases are not supported", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rsplit(":", 1)[1] in ("null", "merge")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


def _construct_int(loader: _Loader, node: Any) -> int:
    # Plain decimal: YAML 1.1 would read 010 as eight.
    return int(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> LifecycleConfig:
    """The config in `path` (None: the defaults) with `key.path=value` overrides applied.

    Raises:
        ConfigError: anything is wrong with the file, an override or a value.
    """
    data = read_mapping(Path(path)) if path is not None else {}
    for override in overrides:
        _apply(data, override)
    return validate(data)


def validate(data: Any) -> LifecycleConfig:
    """`data` as a config. Raises ConfigError."""
    return validate_as(LifecycleConfig, data)


def validate_as(model: type[Model], data: Any) -> Model:
    """`data` as a `model`. Raises ConfigError."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(_describe(problems[0], data, model) + more) from None
    except RecursionError:
        raise ConfigError("the config is nested too deeply") from None


def check_storage(config: LifecycleConfig) -> None:
    """Write to and read from the shared store, where the config names one. Raises ConfigError with the reason."""
    from xray_runtime.store.shared import SharedStore, StorageError

    if config.runtime.storage is not None:
        try:
            SharedStore(config.runtime.storage).check()
        except StorageError as error:
            raise ConfigError(f"runtime.storage: {error}") from None


def resolved_yaml(config: LifecycleConfig) -> str:
    """Every field of `config`, defaults included; loading it gives the same config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_mapping(path: Path) -> dict[str, Any]:
    """The YAML mapping in a file. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read ({reason})") from None
    data = _parse(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a mapping of fields is expected, not {_kind(data)}")
    return data


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark is not None else where
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{place}: not valid YAML: {reason}") from None
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from None


def _apply(data: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not all(path.strip().split(".")):
        raise ConfigError(f"--set {override!r} is not allowed: must be KEY.PATH=VALUE")
    put(data, path, _parse(text, f"--set {path}"), f"--set {path}")


def put(data: dict[str, Any], path: str, value: Any, what: str) -> None:
    """Set the field at a dotted `path` of a config's data. Raises ConfigError, which begins with `what`."""
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
                node[key] = _default(keys[: depth + 1])
            node = node[key]
        else:
            raise ConfigError(f"{what}: {here} is {_kind(node)} and has no field {key!r}")


def _default(keys: list[str]) -> Any:
    """What the config has at `keys` by default: a list there can then be addressed by index."""
    node: Any = LifecycleConfig().model_dump(mode="json")
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, list) else {}


def _describe(error: ErrorDetails, data: Any, model: type[BaseModel]) -> str:
    loc, owner = _user_path(error["loc"], model)
    names = [str(part) if str(part).isprintable() else repr(part) for part in loc]
    path, value, kind = ".".join(names) or "the config", error["input"], error["type"]
    context = error.get("ctx", {})
    if kind == "extra_forbidden":
        known = sorted(_fields(owner))
        close = difflib.get_close_matches(str(loc[-1]), known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        return f"{path}: unknown field{hint}; allowed here: {', '.join(known)}"
    if kind == "missing":
        return f"{path}: is required"
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        tag = str(context["discriminator"]).strip("'")
        allowed = context.get("expected_tags") or ", ".join(map(repr, _tags(owner, loc, tag)))
        got = _show(context["tag"]) if "tag" in context else "nothing"
        return f"{path}.{tag}: {got} is not allowed: must be one of {allowed}"
    if kind == "value_error":
        return f"{path}: {context['error']}" if loc else str(context["error"])
    return f"{path}: {_show(value)} is not allowed: must {_requirement(error)}"


def _requirement(error: ErrorDetails) -> str:
    """What the value must be or have, continuing "must …"."""
    kind, context = error["type"], error.get("ctx", {})
    plain = {
        "model_type": "be a mapping of fields",
        "list_type": "be a list",
        "tuple_type": "be a list",
        "string_type": "be a text",
        "int_type": "be a whole number",
        "float_type": "be a number",
        "bool_type": "be true or false",
        "finite_number": "be a finite number",
        "string_too_short": "not be empty",
        "string_pattern_mismatch": f"match {context.get('pattern')}",
        "too_short": f"have at least {context.get('min_length')} item(s)",
        "too_long": f"have at most {context.get('max_length')} item(s)",
    }
    message = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return plain.get(kind, f"be {message}")


def _user_path(loc: tuple[int | str, ...], model: type[BaseModel]) -> tuple[list[int | str], Any]:
    """`loc` without the tags pydantic inserts where a union was taken, and the model that owns its last part."""
    path: list[int | str] = []
    owner: Any = model
    for part in loc:
        if isinstance(owner, tuple):  # a union: this part names the member taken
            owner = next((m for m in owner if part in _tag_values(m)), owner[0])
            continue
        path.append(part)
        if len(path) < len(loc) and isinstance(part, str) and _is_model(owner):
            owner = _member(owner, part)
        elif isinstance(owner, list):
            owner = owner[0]
    return path, owner


def _member(owner: Any, name: str) -> Any:
    """The model(s) behind field `name`: a model, a tuple of models (union), [model] (list or dict), or the owner."""
    field = owner.model_fields.get(name)
    if field is None:
        return owner
    annotation = field.annotation
    models = [a for a in get_args(annotation) if _is_model(a)]
    if _is_model(annotation):
        return annotation
    if models and getattr(annotation, "__origin__", None) in (list, dict):
        return [models[0]]
    return tuple(models) if len(models) > 1 else owner


def _is_model(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, BaseModel)


def _tag_values(model: type[BaseModel]) -> tuple[Any, ...]:
    first = next(iter(model.model_fields.values()))
    return get_args(first.annotation)


def _tags(owner: Any, loc: list[int | str], tag: str) -> list[Any]:
    members = _member(LifecycleConfig, str(loc[-1])) if _is_model(owner) or not isinstance(owner, tuple) else owner
    return [value for member in members for value in _tag_values(member)] if isinstance(members, tuple) else [tag]


def _fields(owner: Any) -> list[str]:
    return list(owner.model_fields) if _is_model(owner) else []


def _kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "nothing" if value is None else type(value).__name__)


def _show(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
