"""The report of a lifecycle: one self-contained HTML file, readable in light and dark, with nothing fetched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.graph.artifacts import SHOWN_ROLLOUTS
from xray_runtime.kernel.report.cards import cards
from xray_runtime.kernel.report.evaluations import SideBySide, measures
from xray_runtime.kernel.report.figures import StageRecord, drawn_panels, panels_of, parse_metrics
from xray_runtime.kernel.report.layout import lineage_graph
from xray_runtime.kernel.report.rendering import computed_text, run_text, template
from xray_runtime.kernel.tracking.recorder import CURVES

Read = Callable[[Path], bytes | None]
"""The bytes of a file; None where there is none that may be shown."""


def read_file(path: Path) -> bytes | None:
    """The bytes of a file; None if there is none."""
    return path.read_bytes() if path.is_file() else None


def write_report(
    path: Path,
    lifecycle: dict[str, Any],
    records: list[StageRecord],
    samples: list[dict[str, Any]],
    config_yaml: str,
    evaluations: SideBySide | None = None,
    read: Read = read_file,
    pictured: Callable[[str], Markup] = escape,
) -> dict[Path, str]:
    """Write the report of a completed lifecycle; returns path → sha256 of it, and of the curves that were drawn.

    Args:
        lifecycle: the content of lifecycle.json.
        records: the metrics files of the stages; a stage without metrics is left out.
        samples: prompt, replies before and after, and their scores.
        config_yaml: the resolved config.
        evaluations: all results of the policies.
        pictured: a text, escaped, with the pictures in it.
        read: reads a record of a stage; the report is signed, so a run reads only what the log has (`read_logged`).
    """
    written: dict[Path, str] = {}
    drawn = [(record.name, [Markup(panel) for panel in _drawn(record, read, written)]) for record in records]
    html = template("report.html").render(
        run=lifecycle,
        ended=run_text(lifecycle),
        computed=[computed_text(stage) for stage in lifecycle["stages"]],
        address=lifecycle["mlflow_page"] if lifecycle["mlflow_page"].startswith("http") else None,
        cards=cards(lifecycle["evaluation"]) if lifecycle["evaluation"] else [],
        evaluation=lifecycle["evaluation"],
        graph=lineage_graph(lifecycle["stages"]),
        figures=[(name, panels) for name, panels in drawn if panels],
        rollouts=[(record.name, table) for record in records if (table := _rollouts(record, read))],
        samples=samples,
        pictured=pictured,
        config=config_yaml,
        measures=measures(evaluations) if evaluations is not None else [],
    )
    return written | {path: _write(path, html)}


def _write(path: Path, text: str) -> str:
    content = text.encode()
    write_atomic(path, content)
    return hashlib.sha256(content).hexdigest()


def _drawn(record: StageRecord, read: Read, written: dict[Path, str]) -> list[str]:
    """The panels of a stage; it drew them beside its metrics, unless it is an old one."""
    kept = record.metrics_path.with_suffix(CURVES)
    metrics = read(record.metrics_path)
    if metrics is None:
        return []
    if kept.is_file() and kept.stat().st_mtime >= record.metrics_path.stat().st_mtime:
        content = read(kept)
        if content is not None:
            return panels_of(content.decode())
    panels = drawn_panels(record.panels, parse_metrics(metrics))
    if panels:
        written[kept] = _write(kept, "\n".join(panels))
    return panels


def _rollouts(record: StageRecord, read: Read) -> dict[str, Any] | None:
    """Rows of a stage's ledger that it showed, {"columns", "rows"}; None if it showed none."""
    content = read(record.metrics_path.with_name(f"{SHOWN_ROLLOUTS}.json"))
    try:
        table = json.loads(content) if content is not None else None
    except ValueError:
        return None
    return table if isinstance(table, dict) else None
