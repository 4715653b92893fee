"""Facts about a run for its pages: its result, main curve, stages in time, and what a stage at work has left."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import datetime
from pathlib import Path
from typing import Any

from xray.studio.studio import DAMAGED
from xray_runtime.kernel.graph.kind import Series, StageKind
from xray_runtime.kernel.graph.kinds import all_kinds, find_kind
from xray_runtime.kernel.report.cards import Card, cards, sparkline
from xray_runtime.kernel.report.figures import read_metrics
from xray_runtime.kernel.report.names import title
from xray_runtime.kernel.report.rendering import duration
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.tracking.recorder import METRICS, PROGRESS, records_directory

SPARK_WIDTH, SPARK_HEIGHT = 180, 36
"""Size of a sparkline, in pixels."""
MAX_POINTS = 5000
"""Points of a curve that a page gets; of more, every n-th."""


def result_cards(content: Mapping[str, Any]) -> list[Card]:
    """The cards of a run's evaluation; none without one, or if it is damaged."""
    try:
        return cards(content["evaluation"])
    except DAMAGED:
        return []


def alerts(stages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(stage, finding) of what may have gone wrong."""
    return [(s["name"], text) for s in stages for text in s["findings"] if text not in s.get("notes", ())]


def failure(content: Mapping[str, Any]) -> str | None:
    """Why a run failed, as its record says; None if it does not say."""
    found = content.get("failure")
    return found if isinstance(found, str) else None


def notes(stages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(stage, finding) of what was left out, which is no fault."""
    return [(s["name"], text) for s in stages for text in s["findings"] if text in s.get("notes", ())]


def main_curve(output: Path, stages: Sequence[Mapping[str, Any]], working: Sequence[Path]) -> dict[str, Any] | None:
    """The last stage's curve of what it maximizes, or of its loss: `stage`, `name`, `points`, `first`, `last`."""
    directories = [(s["name"], s["kind"], records_directory(output, s["name"], s["key"])) for s in stages]
    directories += [(path.name.rpartition("-")[0], "", path) for path in working]
    for stage, kind, directory in reversed(directories):
        known, series = find_kind(kind), read_metrics(directory / METRICS)
        names = [name for name in known.headline if "/" in name] if known is not None else []
        for name in ("reward/mean", *names, "sft/loss"):
            values = [value for _, value in series.get(name, ())]
            points = sparkline(values[:: max(1, len(values) // SPARK_WIDTH)], SPARK_WIDTH, SPARK_HEIGHT)
            if points:
                return {"stage": stage, "name": name, "points": points, "first": values[0], "last": values[-1]}
    return None


def progress(directory: Path) -> dict[str, Any]:
    """How far a stage at work is: `stage`, and `done`, `total`, `unit`, `share` and `left_s` where it says so."""
    found: dict[str, Any] = {"stage": directory.name.rpartition("-")[0]}
    try:
        content = json.loads(read_bounded(directory / PROGRESS))
        done, total, began = int(content["done"]), int(content["total"]), float(content["began_ms"]) / 1000
        if not total > 0 or not 0 <= done <= total:
            return found
        found |= {"done": done, "total": total, "unit": str(content["unit"])[:20], "share": round(100 * done / total)}
        at = float(content["at_ms"]) / 1000
        if done and at > began:
            found["left_s"] = max(0, round((total - done) * (at - began) / done - (time.time() - at)))
    except DAMAGED:
        pass
    return found


def timeline(stages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The stages with the share of the run's time, in percent, at which each began (`x`) and that it took (`width`);
    without both if another run computed it."""
    ends = [_seconds(stage.get("computed_at")) for stage in stages]
    spans = [
        (end - stage["computed_seconds"], end) if end is not None and not stage["cached"] else None
        for stage, end in zip(stages, ends, strict=True)
    ]
    begin = min((span[0] for span in spans if span), default=0.0)
    whole = max((span[1] for span in spans if span), default=0.0) - begin or 1.0
    return [
        {"stage": stage, "took": duration(stage["computed_seconds"])}
        | ({"x": 100 * (span[0] - begin) / whole, "width": max(100 * (span[1] - span[0]) / whole, 0.4)} if span else {})
        for stage, span in zip(stages, spans, strict=True)
    ]


def _seconds(at: Any) -> float | None:
    try:
        return datetime.fromisoformat(at).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def curves(series: Series, kind: str | None) -> dict[str, Any]:
    """The curves of a stage, for the page's script: `panels` (title, metrics), those that its kind shows first; `names`
    for people; `series`, metric → [steps, values].

    Args:
        kind: None: the stage is at work, and has the panels that show most of its curves.
    """
    drawn = {name for name, points in series.items() if len(points) > 1}
    known = find_kind(kind) if kind is not None else _likely_kind(drawn)
    panels = [(text, [n for n in names if n in drawn]) for text, names in (known.panels if known is not None else ())]
    shown = [(text, names) for text, names in panels if names]
    first = {name for _, names in shown for name in names}
    more = [(title(name), [name]) for name in sorted(drawn - first)]
    return {
        "panels": shown or more,
        "more": more if shown else [],
        "names": {name: title(name) for name in drawn},
        "series": {name: _points(series[name]) for name in drawn},
    }


def _likely_kind(drawn: Set[str]) -> StageKind:
    """The kind whose panels show most of these metrics."""
    return max(all_kinds(), key=lambda kind: sum(name in drawn for _, names in kind.panels for name in names))


def _points(points: Sequence[tuple[int, float]]) -> list[list[Any]]:
    chosen = points[:: -(-len(points) // MAX_POINTS)]
    # Numbers that are not finite are gaps.
    return [[step for step, _ in chosen], [value if math.isfinite(value) else None for _, value in chosen]]


def numbers(series: Series) -> Iterator[tuple[str, str, float, float]]:
    """(name for people, name, first, last) of every metric of a stage."""
    for name, points in sorted(series.items()):
        yield title(name), name, points[0][1], points[-1][1]
