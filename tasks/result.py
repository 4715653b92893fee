"""The result of a finished stage, as users see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xray.tasks.spec import StageResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Result:
    """A finished stage."""

    stage: StageResult
    output: Path
    tracking_uri: str

    @property
    def path(self) -> Path:
        """Directory of its checkpoint."""
        return self.stage.checkpoint.path

    @property
    def sha256(self) -> str:
        """Digest of the checkpoint's manifest, which lists every file with its own."""
        return self.stage.checkpoint.sha256

    @property
    def metrics(self) -> dict[str, float]:
        """Metric → last recorded value."""
        return {name: points[-1][1] for name, points in self.series().items()}

    def figure(self) -> Figure | None:
        """Its training curves as in the report; None if it has none."""
        from xray_runtime.kernel.graph.kinds import find_kind
        from xray_runtime.kernel.report.figures import training_figure

        kind = find_kind(self.stage.kind)
        return training_figure(kind.panels, self.series()) if kind is not None else None

    def series(self) -> dict[str, list[tuple[int, float]]]:
        """Metric → its (step, value) points."""
        from xray_runtime.kernel.report.figures import read_metrics
        from xray_runtime.kernel.tracking.recorder import METRICS, records_directory

        return read_metrics(records_directory(self.output, self.stage.name, self.stage.key) / METRICS)

    def lineage(self) -> str:
        """Its ancestors as a tree."""
        from xray_runtime.kernel.history.reference import open_lineage_store
        from xray_runtime.kernel.history.render import lineage_text

        store = open_lineage_store(self.output, self.tracking_uri)
        return "\n".join(lineage_text(store.graph, store.graph.nodes[self.sha256], False))
