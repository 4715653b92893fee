"""A stage's points as TensorBoard's event files, beside its file of metrics."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

EVENTS = "tensorboard"
"""Folder of the event files, among a stage's records."""


class EventFiles:
    """Writes event files of one attempt. Those of earlier attempts go: an attempt writes all points again.

    Args:
        records: directory of the stage's records.
    """

    def __init__(self, records: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = records / EVENTS
        shutil.rmtree(place, ignore_errors=True)
        self._writer = SummaryWriter(str(place))

    def points(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write points as a file of metrics has them (`recorder.read_points`)."""
        for line in lines:
            for name, value in line["metrics"].items():
                self._writer.add_scalar(name, value, line["step"], line["time_ms"] / 1000)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
