"""A stage's points as an offline run of Weights & Biases, beside its file of metrics.

Nothing is sent and no login is needed: `wandb sync DIRECTORY` uploads the run, when and where somebody wants that.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RUNS = "wandb"
"""Folder of the run, among a stage's records."""


class OfflineRun:
    """Writes the run of one attempt. Those of earlier attempts go: an attempt writes all points again.

    Args:
        records: directory of the stage's records; its name is the run's.
    """

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
        """Write points as a file of metrics has them (`recorder.read_points`)."""
        for line in lines:
            self._run.log({**line["metrics"], "_timestamp": line["time_ms"] / 1000}, step=line["step"])

    def close(self) -> None:
        import wandb

        self._run.finish()
        # Its service may write the file's end after that, and what a stage leaves is signed next.
        wandb.teardown()
