"""Load the config of the shipped lifecycle from files and overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xray_runtime.kernel.config.loading import parse_overrides, read_mapping, to_yaml
from xray_runtime.kernel.config.paths import put
from xray_runtime.kernel.config.validation import validate_as
from xray_runtime.methods.lifecycle import LifecycleConfig


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
    return to_yaml(config.model_dump(mode="json"))


def _default(keys: list[str]) -> Any:
    """The default value at `keys`, so that `--set` can address items of a default list by index."""
    node: Any = LifecycleConfig().model_dump(mode="json")
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, list) else {}
