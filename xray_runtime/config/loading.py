"""Load configs from files and overrides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.paths import kind_of, put
from xray_runtime.config.validation import ConfigError, validate_as

MAX_FILE_BYTES = 16 * 2**20
PIPES = (Path("/dev"), Path("/dev/fd"))
"""Where shells put pipes for `<(COMMAND)`. Reading a pipe elsewhere could wait forever for a writer."""


class _Loader(yaml.SafeLoader):
    """A strict YAML loader: 1e-4 is a number, only true and false are booleans; repeated keys and aliases are
    errors."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "aliases are not supported", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is a list or a mapping", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
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
        ConfigError: the file, an override or a value is not allowed.
    """
    data = read_mapping(Path(path)) if path is not None else {}
    for field, value in parse_overrides(overrides).items():
        put(data, field, value, f"--set {field}", _default)
    return validate(data)


def validate(data: Any) -> LifecycleConfig:
    """`data` as a config. Raises ConfigError."""
    return validate_as(LifecycleConfig, data)


def resolved_yaml(config: LifecycleConfig) -> str:
    """Every field of `config`, defaults included; loading it gives the same config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_mapping(path: Path) -> dict[str, Any]:
    """The YAML mapping in a file. Raises ConfigError."""
    try:
        if path.is_fifo() and path.parent not in PIPES:
            raise ConfigError(f"{path}: is a pipe: give a file, or - from a shell - <(COMMAND)")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: is larger than {MAX_FILE_BYTES:,} bytes: give a config")
        text = content.decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read ({reason})") from None
    data = _parse(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a mapping of fields is expected, not {kind_of(data)}")
    return data


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark is not None else where
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{place}: not valid YAML: {reason}") from None
    # Its constructors raise these for a value that does not match its tag (!!bool, !!timestamp).
    except (RecursionError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{where}: not valid YAML: {reason or type(error).__name__}") from None


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`KEY.PATH=VALUE` texts as dotted paths with their values. Raises ConfigError."""
    values: dict[str, Any] = {}
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip()
        if not equals or not all(path.split(".")):
            raise ConfigError(f"--set {override!r} is not allowed: must be KEY.PATH=VALUE")
        values[path] = _parse(text, f"--set {path}")
    return values


def _default(keys: list[str]) -> Any:
    """The default value at `keys`, so that `--set` can address items of a default list by index."""
    node: Any = LifecycleConfig().model_dump(mode="json")
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, list) else {}
