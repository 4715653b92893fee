"""An output directory: its last config, its locks, and the records of interrupted runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import AcquireReturnProxy, FileLock, Timeout

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.log import read_run
from xray_runtime.kernel.evidence.view import LOCKS, run_lock
from xray_runtime.kernel.store.identity import digest

if TYPE_CHECKING:
    from xray_runtime.methods.lifecycle import LifecycleConfig

CONFIG, SEARCH = "config.yaml", "search.yaml"


def saved_config(output: Path) -> LifecycleConfig:
    """The config of the last run in `output`, or the defaults if there is none."""
    from xray_runtime.methods.loading import load_config

    path = output / CONFIG
    return load_config(path if path.is_file() else None)


def interrupted_stages(output: Path) -> dict[str, int]:
    """Interrupted stage → step of its last snapshot."""
    snapshots = sorted(output.glob("snapshots/*/step-" + "[0-9]" * 10), key=lambda path: path.name)
    return {path.parent.name.rsplit("-", 1)[0]: int(path.name.removeprefix("step-")) for path in snapshots}


def resume_point(output: Path) -> str:
    """The point from which an interrupted run in `output` will continue, as text."""
    steps = [f"{stage} step {step}" for stage, step in interrupted_stages(output).items()]
    if steps:
        return " and ".join(steps)
    done = read_run(output).get("stages")
    return f"the end of {done[-1]['name']}" if done else "the beginning"


def require_no_run(output: Path) -> None:
    """Raises ConfigError if a run is using `output`."""
    for path in (output / LOCKS).glob("run-*.lock"):
        try:
            FileLock(path).acquire(timeout=0).lock.release()
        except Timeout:
            raise ConfigError(f"--output: another run is using {str(output)!r}") from None


def file_lock(directory: Path, name: str = "lock") -> AcquireReturnProxy:
    """A lock on `directory`, held until its `with` block or this process ends.

    Raises:
        ConfigError: another process holds it.
    """
    try:
        return FileLock(directory / name).acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"--output: another command is using {str(directory)!r}") from None


def unfinished_run(run_directory: Path, output: Path, record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The lifecycle.json in `run_directory` if it is one of an interrupted run of the same config, else None."""
    content = read_run(run_directory)
    is_same = content.get("config_digest") == digest(record)
    if not is_same or content.get("status") in (None, "completed") or not content.get("run_id"):
        return None
    try:
        # A run that is still active holds its lock.
        run_lock(output, content["run_id"]).acquire(timeout=0).lock.release()
    except (OSError, Timeout):
        return None
    return content
