"""Prometheus metrics of an output directory: its runs, their engines, cycles and audits, read anew for each scrape.

Served models have metrics of their own: `/metrics` of `xray serve`, from vLLM, the recorder and a canary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import GaugeMetricFamily

from xray.flows.cycles import DONE, FILE, cycle_directory, read_cycles
from xray.studio.access import METRICS_PATH
from xray.studio.pages.runs import RUNNING, runs, working
from xray.studio.studio import Pages, Studio, studio_of
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.kinds.canary import Canaries
from xray_runtime.kernel.evidence.kinds.withdrawn import Withdrawals
from xray_runtime.kernel.evidence.log import view
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.report.figures import read_metrics
from xray_runtime.kernel.tracking.recorder import METRICS
from xray_runtime.live.feedback.canary import Monitor
from xray_runtime.live.serving.canary_metrics import CanaryState, canary_gauges

router = APIRouter()
PAGES = Pages(router)

STATUSES = ("completed", "failed", "interrupted", RUNNING)


@router.get(METRICS_PATH)
def metrics(request: Request) -> Response:
    return Response(generate_latest(OutputCollector(studio_of(request))), media_type=CONTENT_TYPE_LATEST)


@dataclass(frozen=True)
class OutputCollector:
    """Reads the output directory of a studio."""

    studio: Studio

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Every metric, with its value now."""
        output = self.studio.output
        yield from _of_runs(output)
        yield from _of_cycles(output)
        yield from _of_canary(self.studio.store())
        withdrawals = view(output).state(Withdrawals)
        yield GaugeMetricFamily("xray_withdrawals", "Withdrawals in the signed log", len(withdrawals))
        if (audited := self.studio.audited) is not None:
            text = "Whether the last audit found everything sound"
            yield GaugeMetricFamily("xray_audit_sound", text, float(audited.is_sound))
            text = "Findings that break the last audit"
            yield GaugeMetricFamily("xray_audit_broken_findings", text, len(audited.broken))
            yield GaugeMetricFamily("xray_audit_timestamp_seconds", "End of the last audit", self.studio.audited_at)


def _of_runs(output: Path) -> Iterator[GaugeMetricFamily]:
    counted = GaugeMetricFamily("xray_runs", "Runs in the signed log", labels=["status"])
    last = GaugeMetricFamily(
        "xray_stage_metric", "Last point of each metric of a stage at work", labels=["run", "stage", "metric"]
    )
    step = GaugeMetricFamily("xray_stage_step", "Last step of a stage at work", labels=["run", "stage"])
    changed = GaugeMetricFamily(
        "xray_stage_timestamp_seconds", "Time of the last point of a stage at work", labels=["run", "stage"]
    )
    listed = runs(output)
    statuses = Counter(run["status"] for run in listed)
    for status in sorted({*STATUSES, *statuses}):
        counted.add_metric([status], statuses[status])
    for run in listed:
        for directory in working(output, run):
            stage = directory.name.rpartition("-")[0]
            path = directory / METRICS
            series = read_metrics(path)
            for name, points in sorted(series.items()):
                last.add_metric([run["id"], stage, name], points[-1][1])
            if series:
                step.add_metric([run["id"], stage], max(points[-1][0] for points in series.values()))
            changed.add_metric([run["id"], stage], path.stat().st_mtime)
    yield from (counted, last, step, changed)


def _of_cycles(output: Path) -> Iterator[GaugeMetricFamily]:
    text = "Whether the cycles' files are as the signed log has them"
    try:
        cycles = read_cycles(output)
    except ConfigError:
        yield GaugeMetricFamily("xray_cycles_sound", text, 0.0)
        return
    if not cycles:
        return
    yield GaugeMetricFamily("xray_cycles_sound", text, 1.0)
    cycle = cycles[-1]
    state = GaugeMetricFamily("xray_cycle_state", "State of the last cycle: 1 for one of them", labels=["state"])
    for name in ("begun", *DONE):
        state.add_metric([name], float(cycle.state == name))
    yield state
    yield GaugeMetricFamily("xray_cycle_number", "Number of the last cycle", cycle.number)
    changed = (cycle_directory(output, cycle) / FILE).stat().st_mtime
    yield GaugeMetricFamily("xray_cycle_timestamp_seconds", "Last change of the last cycle's record", changed)


def _of_canary(store: LineageStore) -> Iterator[GaugeMetricFamily]:
    """The last canary, as it is now or ended, by arm."""
    canary = next(reversed(view(store.output).state(Canaries).values()), None)
    if canary is None:
        return
    ended = canary.ended
    if ended is None:
        monitor = Monitor(store, canary, None)
        ended = monitor.check() or monitor.decision("undecided", "")
    yield from canary_gauges(CanaryState(canary.ended is None, ended.arms))
