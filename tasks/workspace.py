"""An output directory while somebody works in it: its config, and the locks that keep others out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.loading import load_config
from xray_runtime.config.validation import ConfigError

CONFIG, SEARCH = "config.yaml", "search.yaml"
LIFECYCLE_LOCK = "lifecycle.lock"
"""Held by the flow itself, however it was started; `lock` by a command that works in the directory."""


def saved_config(output: Path, overrides: Sequence[str] = ()) -> LifecycleConfig:
    """The config `output` was last run with (the defaults where it was made elsewhere), with overrides."""
    path = output / CONFIG
    return load_config(path if path.is_file() else None, overrides)


def file_lock(directory: Path, name: str = "lock") -> AcquireReturnProxy:
    """A lock on `directory`, held until its `with` block ends, or this process.

    Raises:
        ConfigError: another process holds it.
    """
    try:
        return FileLock(directory / name).acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"--output: another xray run is at work in {str(directory)!r}") from None
