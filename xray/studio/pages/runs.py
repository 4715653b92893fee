"""Runs: the list with its audit state, and the progress of one run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from xray.studio.access import Fields
from xray.studio.pages.models import waiting_candidates
from xray.studio.pages.review import judge_of, waiting_reviews
from xray.studio.run_facts import alerts, curves, failure, main_curve, notes, numbers, progress, result_cards, timeline
from xray.studio.studio import DAMAGED, Link, Pages, page, studio_of
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.log import read_run, view
from xray_runtime.kernel.evidence.view import is_at_work
from xray_runtime.kernel.report.figures import read_metrics
from xray_runtime.kernel.report.layout import lineage_graph
from xray_runtime.kernel.report.rendering import computed_text
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.store.shared import is_safe
from xray_runtime.kernel.tracking.recorder import METRICS, RECORDS, records_directory

router = APIRouter()
PAGES = Pages(router, (Link("/", "Runs", 10),))

MAX_RUNS = 40
"""Runs on the front page."""
MAX_ROWS, MAX_TEXT = 6, 600
RUNNING = "running"


def runs(output: Path) -> list[dict[str, Any]]:
    """Every run that the signed log knows, newest first: its id, log entry, status, stages and record."""
    log = view(output)
    open_runs, last = log.open_runs(output), {run.run_directory: run_id for run_id, run in log.runs.items()}
    listed_runs = []
    for run_id, run in reversed(list(log.runs.items())):
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
        texts += [*stage.get("notes", ()), *stage["parents"]]
        computed_text(stage)
    except DAMAGED:
        return False
    safe = all(isinstance(text, str) for text in texts) and is_safe(f"{stage['name']}-{stage['key'][:12]}")
    return safe and "/" not in stage["name"] + stage["key"]


@router.get("/")
def run_list(request: Request) -> Response:
    return page(request, "runs.html", **_listed(request))


@router.get("/runs")
def run_list_part(request: Request) -> Response:
    """The list alone, which the front page requests again while a run is active."""
    return page(request, "runs_part.html", **_listed(request))


def _listed(request: Request) -> dict[str, Any]:
    output = studio_of(request).output
    found = runs(output)
    for run in found[:MAX_RUNS]:
        at_work = working(output, run)
        run["cards"], run["alerts"] = result_cards(run["content"]), alerts(run["stages"])
        run["failure"] = failure(run["content"])
        run["at_work"] = [progress(path) for path in at_work]
        run["curve"] = main_curve(output, run["stages"], at_work)
    return {"runs": found[:MAX_RUNS], "older": len(found) - MAX_RUNS, "live": any(r["at_work"] for r in found[:1])}


@router.get("/waiting")
def waiting(request: Request) -> Response:
    """List what only a person can decide: answers to judge, and candidates to promote."""
    studio = studio_of(request)
    found = [*waiting_reviews(studio, judge_of(request)), *waiting_candidates(studio)]
    return page(request, "waiting_part.html", waiting=found)


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
    run, others = _run(output, run_id)
    at_work, listed = working(output, run), run["stages"]
    values: dict[str, Any] = {
        "cards": result_cards(run["content"]),
        "failure": failure(run["content"]),
        "alerts": alerts(listed),
        "notes": notes(listed),
        "timeline": timeline(listed),
        "graph": lineage_graph(listed),
        "at_work": [progress(path) for path in at_work],
        "stages": list(stages(output, run)),
    }
    return page(request, template, run=run, others=[other for other in others if other["id"] != run_id], **values)


def _run(output: Path, run_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A run, and all of them. Raises ConfigError if the log does not know it."""
    found = runs(output)
    run = next((run for run in found if run["id"] == run_id), None)
    if run is None:
        raise ConfigError(f"run: {run_id!r} is not in the log of {str(output)!r}")
    return run, found


@router.get("/runs/{run_id}/curves")
def run_curves(request: Request, run_id: str) -> Response:
    """The curves of all stages as JSON, for the page's script."""
    output = studio_of(request).output
    run, _ = _run(output, run_id)
    listed = [(s["name"], s["kind"], records_directory(output, s["name"], s["key"])) for s in run["stages"]]
    listed += [(path.name.rpartition("-")[0], None, path) for path in working(output, run)]
    # The newest first: people come for the policy's curves.
    found = [{"stage": name, **curves(read_metrics(path / METRICS), kind)} for name, kind, path in reversed(listed)]
    name = f"{run['run'].name} {run_id[:8]}"
    return JSONResponse({"run": name, "live": run["status"] == RUNNING, "stages": [s for s in found if s["panels"]]})


def stages(output: Path, run: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The stages of a run, those at work last: name, state, numbers, tables of samples."""
    for stage in run["stages"]:
        directory = records_directory(output, stage["name"], stage["key"])
        facts = {"name": stage["name"], "state": computed_text(stage), "sha256": stage["checkpoint"]["sha256"]}
        yield facts | {"numbers": list(numbers(read_metrics(directory / METRICS))), "tables": tables(directory)}
    for directory in working(output, run):
        facts = {"name": directory.name.rpartition("-")[0], "state": "at work", "sha256": None}
        yield facts | {"numbers": list(numbers(read_metrics(directory / METRICS))), "tables": tables(directory)}


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
