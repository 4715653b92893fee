"""Runs: the list with its audit state, and the progress of one run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from xray.studio.access import Fields
from xray.studio.studio import DAMAGED, Link, Pages, page, studio_of
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.log import read_run, view
from xray_runtime.kernel.evidence.view import is_at_work
from xray_runtime.kernel.graph.kinds import find_kind
from xray_runtime.kernel.report.figures import read_metrics
from xray_runtime.kernel.report.rendering import computed_text
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.store.shared import is_safe
from xray_runtime.kernel.tracking.recorder import METRICS, RECORDS, records_directory

router = APIRouter()
PAGES = Pages(router, (Link("/", "Runs", 10),))

WIDTH, HEIGHT = 240, 56
"""Size of a curve, in pixels."""
MAX_POINTS, MAX_CURVES, MAX_ROWS, MAX_TEXT = 240, 24, 6, 600
RUNNING = "running"


def runs(output: Path) -> list[dict[str, Any]]:
    """Every run that the signed log knows, newest first: its id, log entry, status, stages and record."""
    log = view(output)
    open_runs, last = log.open_runs(output), {run.run_directory: run_id for run_id, run in log.runs.items()}
    listed_runs = []
    for run_id, run in reversed(log.runs.items()):
        content = read_run(output / run.run_directory) if last[run.run_directory] == run_id else {}
        status = log.ended[run_id].status if run_id in log.ended else "interrupted"
        if run_id in open_runs:
            # The record of a run that was killed says that it runs.
            runs_still = content.get("status") == RUNNING and is_at_work(output, run_id)
            status = RUNNING if runs_still else "interrupted"
        # A record that was damaged shows fewer stages; the audit names it.
        listed = content.get("stages")
        stages = [s for s in (listed if isinstance(listed, list) else []) if _is_stage(s)]
        listed_runs.append({"id": run_id, "run": run, "status": status, "stages": stages, "content": content})
    return listed_runs


def _is_stage(stage: Any) -> bool:
    """Whether an entry of lifecycle.json has the fields that the page shows, with values of their types."""
    try:
        texts = [stage["name"], stage["kind"], stage["key"], stage["checkpoint"]["sha256"], *stage["findings"]]
        computed_text(stage)
    except DAMAGED:
        return False
    safe = all(isinstance(text, str) for text in texts) and is_safe(f"{stage['name']}-{stage['key'][:12]}")
    return safe and "/" not in stage["name"] + stage["key"]


@router.get("/")
def run_list(request: Request) -> Response:
    return page(request, "runs.html", runs=runs(studio_of(request).output))


@router.post("/audit")
def audit_all(request: Request, fields: Fields) -> Response:
    studio = studio_of(request)
    studio.audit(hashing=fields.get("hashing") == "yes")
    if "hx-request" not in request.headers:
        return RedirectResponse("/", 303)
    assert studio.audited is not None
    return page(request, "audit_part.html", findings=[f.to_json() for f in studio.audited.findings])


@router.get("/runs/{run_id}")
def run_page(request: Request, run_id: str) -> Response:
    return _run_page(request, run_id, "run.html")


@router.get("/runs/{run_id}/live")
def live(request: Request, run_id: str) -> Response:
    """The part of the page that changes; htmx requests it while the run is active."""
    return _run_page(request, run_id, "run_part.html")


def _run_page(request: Request, run_id: str, template: str) -> Response:
    output = studio_of(request).output
    run = next((run for run in runs(output) if run["id"] == run_id), None)
    if run is None:
        raise ConfigError(f"run: {run_id!r} is not in the log of {str(output)!r}")
    return page(request, template, run=run, stages=list(stages(output, run)))


def stages(output: Path, run: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The stages of a run, those at work last: name, state, curves, tables of samples, findings."""
    for stage in run["stages"]:
        directory = records_directory(output, stage["name"], stage["key"])
        sha256, drawn = stage["checkpoint"]["sha256"], curves(directory / METRICS, stage["kind"])
        facts = {"name": stage["name"], "state": computed_text(stage), "sha256": sha256, "findings": stage["findings"]}
        yield facts | {"curves": drawn, "tables": tables(directory)}
    for directory in working(output, run):
        facts = {"name": directory.name.rpartition("-")[0], "state": "at work", "sha256": None, "findings": []}
        yield facts | {"curves": curves(directory / METRICS, None), "tables": tables(directory)}


def working(output: Path, run: dict[str, Any]) -> list[Path]:
    """The directories of records of the stages of a run that are at work."""
    if run["status"] != RUNNING:
        return []
    done = {f"{stage['name']}-{stage['key'][:12]}" for stage in run["stages"]}
    try:
        began = datetime.fromisoformat(run["run"].at).timestamp() if run["run"].at else 0.0
    except (ValueError, OverflowError):
        began = 0.0
    paths = sorted((output / RECORDS).glob(f"*/{METRICS}"))
    return [path.parent for path in paths if path.parent.name not in done and path.stat().st_mtime >= began]


def curves(path: Path, kind: str | None) -> list[dict[str, Any]]:
    """The curves of a stage: those of its kind's panels first. Points are (x, y) of an SVG of WIDTH by HEIGHT."""
    series = read_metrics(path)
    known = find_kind(kind) if kind is not None else None
    first = [name for _, names in known.panels for name in names] if known is not None else []
    ordered = [*(name for name in first if name in series), *sorted(series.keys() - set(first))]
    return [_curve(name, series[name]) for name in ordered[:MAX_CURVES]]


def _curve(name: str, points: list[tuple[int, float]]) -> dict[str, Any]:
    points = points[:: max(1, len(points) // MAX_POINTS)] + points[-1:]
    steps, values = [step for step, _ in points], [v for _, v in points if v == v and abs(v) != float("inf")]
    low, high = min(values, default=0.0), max(values, default=0.0)
    width, height = max(steps[-1] - steps[0], 1), high - low or 1.0
    drawn = [
        f"{(step - steps[0]) / width * WIDTH:.1f},{HEIGHT - 3 - (value - low) / height * (HEIGHT - 6):.1f}"
        for step, value in points
        if value == value and abs(value) != float("inf")
    ]
    return {"name": name, "points": " ".join(drawn), "first": points[0][1], "last": points[-1][1], "step": steps[-1]}


def tables(directory: Path) -> list[dict[str, Any]]:
    """The tables that a stage wrote, newest first, each with its last rows."""
    shown = []
    for path in sorted(directory.glob("*.json"), key=lambda p: -p.lstat().st_mtime):
        try:
            content = json.loads(read_bounded(path))
            rows = [[_cell(value) for value in row] for row in islice(reversed(content["rows"]), MAX_ROWS)]
            shown.append({"name": path.stem, "columns": [str(c) for c in content["columns"]], "rows": rows})
        # It is being written, or damaged.
        except DAMAGED:
            continue
    return shown


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:+.3f}"
    text = "" if value is None else str(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
