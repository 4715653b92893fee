"""Load configs from files and overrides."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import MappingNode, ScalarNode

from xray_runtime.kernel.config.paths import kind_of
from xray_runtime.kernel.config.validation import ConfigError

MAX_FILE_BYTES = 16 * 2**20
PIPES = (Path("/dev"), Path("/dev/fd"))
"""Where shells put pipes for `<(COMMAND)`. Reading a pipe elsewhere could wait forever for a writer."""


class _Composer(Composer):
    """Refuses aliases, with which a small file becomes a large config, and keys that are no texts."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.parser.check_event(AliasEvent):
            raise ComposerError(None, None, "aliases are not supported", self.parser.peek_event().start_mark)
        node = super().compose_node(parent, index)
        if isinstance(parent, MappingNode) and index is None and not isinstance(node, ScalarNode):
            raise ComposerError(None, None, "a key is a list or a mapping", node.start_mark)
        return node


class _Constructor(SafeConstructor):
    """Leaves a date a text."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def _yaml() -> YAML:
    """YAML 1.2: 1e-4 is a number, only true and false are booleans, 010 is ten, and no key is given twice."""
    strict = YAML(typ="safe", pure=True)
    strict.Composer, strict.Constructor = _Composer, _Constructor
    strict.default_flow_style = False
    strict.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    return strict


def to_yaml(data: Any) -> str:
    """`data`, of what JSON has, as YAML that reads back as it is."""
    text = io.StringIO()
    _yaml().dump(data, text)
    return text.getvalue()


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
        return _yaml().load(text)
    except YAMLError as error:
        mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
        line = f"{where}:{mark.line + 1}" if mark is not None else where
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{line}: not valid YAML: {reason}") from None
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
