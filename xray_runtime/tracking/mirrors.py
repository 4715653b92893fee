"""Other places that a stage's points go to: `runtime.mirror` names one. Each library is optional."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from xray_runtime.config.validation import ConfigError
from xray_runtime.tracking.tensorboard import EventFiles
from xray_runtime.tracking.wandb import OfflineRun


class Mirror(Protocol):
    """One attempt's points in another place."""

    def points(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write points as a file of metrics has them (`recorder.read_points`)."""

    def close(self) -> None: ...


MIRRORS: dict[str, Callable[[Path], Mirror]] = {"tensorboard": EventFiles, "wandb": OfflineRun}
"""Name, which is also that of the library and of the extra → opens it, given the directory of a stage's records."""


def require_mirror(name: str) -> None:
    """Raises ConfigError if the library behind `runtime.mirror` is not installed."""
    if name in MIRRORS and find_spec(name) is None:
        raise ConfigError(
            f"runtime.mirror: {name!r} is not allowed: it is not installed; `pip install xray-rlhf[{name}]`"
        )
