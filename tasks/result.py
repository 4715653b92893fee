"""A finished stage, as people look at it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xray.tasks.spec import StageResult


@dataclass(frozen=True)
class Result:
    """A finished stage."""

    stage: StageResult
    output: Path
    """The output directory it lies in."""
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
        """The last value of each metric it recorded."""
        from xray_runtime.report.figures import read_metrics
        from xray_runtime.tracking.recorder import METRICS, records_directory

        records = records_directory(self.output, self.stage.name, self.stage.key)
        return {name: points[-1][1] for name, points in read_metrics(records / METRICS).items()}

    def lineage(self) -> str:
        """Where it came from, as a tree."""
        from xray_runtime.lineage.reference import open_lineage_store
        from xray_runtime.lineage.render import lineage_text

        store = open_lineage_store(self.output, self.tracking_uri)
        return "\n".join(lineage_text(store.graph, store.graph.nodes[self.sha256], False))
