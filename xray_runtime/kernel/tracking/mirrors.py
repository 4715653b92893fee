"""Other places that a stage's points go to, beside its file of metrics: `runtime.mirror` names one.

Each library is optional.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from xray_runtime.kernel.config.validation import ConfigError

EVENTS, RUNS = "tensorboard", "wandb"
"""Folders of the mirrors among a stage's records."""


class Mirror(Protocol):
    """One attempt's points in another place. Those of earlier attempts go: an attempt writes all points again."""

    def points(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write points as a file of metrics has them (`recorder.read_points`)."""

    def close(self) -> None: ...


class EventFiles:
    """TensorBoard's event files."""

    def __init__(self, records: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = records / EVENTS
        shutil.rmtree(directory, ignore_errors=True)
        self._writer = SummaryWriter(str(directory))

    def points(self, lines: Sequence[Mapping[str, Any]]) -> None:
        for line in lines:
            for name, value in line["metrics"].items():
                self._writer.add_scalar(name, value, line["step"], line["time_ms"] / 1000)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class OfflineRun:
    """An offline run of Weights & Biases, which needs no login: `wandb sync DIRECTORY` uploads it, on demand."""

    def __init__(self, records: Path) -> None:
        import wandb

        shutil.rmtree(records / RUNS, ignore_errors=True)
        settings = wandb.Settings(
            # Packages, the command line and the machine are not its business; stdout is the stage's own.
            console="off", disable_git=True, save_code=False, silent=True, x_disable_stats=True, x_disable_meta=True
        )  # fmt: skip
        self._run = wandb.init(
            project=records.parent.parent.name,
            name=records.name,
            dir=str(records),
            mode="offline",
            reinit="create_new",
            settings=settings,
        )

    def points(self, lines: Sequence[Mapping[str, Any]]) -> None:
        for line in lines:
            self._run.log({**line["metrics"], "_timestamp": line["time_ms"] / 1000}, step=line["step"])

    def close(self) -> None:
        import wandb

        self._run.finish()
        # Its service may write the file's end after that, and what a stage leaves is signed next.
        wandb.teardown()


MIRRORS: dict[str, Callable[[Path], Mirror]] = {"tensorboard": EventFiles, "wandb": OfflineRun}
"""Name, which is also that of the library and of the extra → opens it, given the directory of a stage's records."""


def require_mirror(name: str) -> None:
    """Raises ConfigError if the library behind `runtime.mirror` is not installed."""
    if name in MIRRORS and find_spec(name) is None:
        raise ConfigError(
            f"runtime.mirror: {name!r} is not allowed: it is not installed; `pip install xray-rlhf[{name}]`"
        )
