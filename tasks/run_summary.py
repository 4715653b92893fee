"""lifecycle.json, the record of a run, and its report."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from xray.tasks.spec import StageResult
from xray.tasks.summary import evaluation_rows
from xray_runtime.files import write_atomic
from xray_runtime.graph.artifacts import Evaluation
from xray_runtime.lineage.attestation import read_statement
from xray_runtime.lineage.log import LIFECYCLE, REPORT, RunEnded, append, digests, view
from xray_runtime.lineage.signing import signing_key
from xray_runtime.report.evaluations import Measured, SideBySide, as_json, measured, side_by_side
from xray_runtime.report.figures import FIGURE, StageRecord, read_metrics
from xray_runtime.report.rendering import computed_text
from xray_runtime.stages.kinds import find_kind
from xray_runtime.store.identity import digest
from xray_runtime.tracking.mlflow_tracker import ARTIFACTS
from xray_runtime.tracking.recorder import METRICS, records_directory


class RunSummary:
    """The content of lifecycle.json, written atomically after every stage.

    Args:
        output: directory of the checkpoints and records.
        place: directory of lifecycle.json and the report.
        record: the config of the run.
        address: address of its MLflow page (`Tracker.address`).
    """

    def __init__(
        self,
        output: Path,
        place: Path,
        record: Mapping[str, Any],
        run_id: str,
        flow_run_id: str | None,
        address: str,
    ) -> None:
        self.path, self.report = place / LIFECYCLE, place / REPORT
        self._output, self._record, self._start = output, dict(record), time.perf_counter()
        self._lock = threading.Lock()
        self._stages: dict[int, dict[str, Any]] = {}
        self._measured: dict[int, Measured] = {}
        self._evaluation: tuple[int, Path] | None = None
        """Number and checkpoint of the graph's last evaluation."""
        self.content: dict[str, Any] = {
            "run_id": run_id,
            "mlflow_page": address,
            "flow_run_id": flow_run_id,
            "config_digest": digest(self._record),
            "project": self._record.get("project"),
            "seed": self._record.get("seed"),
            "status": "running",
            "seconds": 0.0,
            "stages": [],
            "evaluation": None,
            "evaluations": None,
            "registered": None,
        }
        self._write()

    def stage_done(self, number: int, result: StageResult, seconds: float) -> None:
        """Add the `number`th stage of the graph."""
        self._stages[number] = {
            "name": result.name,
            "kind": result.kind,
            "key": result.key,
            "checkpoint": {"uri": result.checkpoint.uri, "sha256": result.checkpoint.sha256},
            "parents": sorted(set(result.parents.values())),
            "dataset": result.dataset,
            "mlflow_run_id": result.mlflow_run_id,
            "mlflow_model_id": result.checkpoint.mlflow_model_id,
            "seconds": seconds,
            "computed_seconds": result.seconds,
            "computed_at": _finished(result.checkpoint.path),
            "attempts": result.attempts,
            "cached": result.cached,
            "findings": self._findings(result),
        }
        self.content["stages"] = [self._stages[n] for n in sorted(self._stages)]
        kind = find_kind(result.kind)
        if kind is not None and kind.sides and kind.results:
            self._measured[number] = measured(kind, result.checkpoint.path)
            self.content["evaluations"] = as_json(self.evaluations())
            if kind.output is Evaluation and (self._evaluation is None or self._evaluation[0] < number):
                self._evaluation = number, result.checkpoint.path
                text = (result.checkpoint.path / "evaluation.json").read_text(encoding="utf-8")
                self.content["evaluation"] = json.loads(text)
        self._write()

    def evaluations(self) -> SideBySide:
        """The measurements of all policies so far."""
        names = {stage["checkpoint"]["sha256"]: stage["name"] for stage in self.content["stages"]}
        return side_by_side([self._measured[n] for n in sorted(self._measured)], names)

    def _findings(self, result: StageResult) -> list[str]:
        kind = find_kind(result.kind)
        path = records_directory(self._output, result.name, result.key) / METRICS
        return [] if kind is None else list(kind.findings(read_metrics(path)))

    def registered(self, registered: Mapping[str, str]) -> None:
        self.content["registered"] = dict(registered)
        self._write()

    def close(self, status: str) -> str:
        """Set `status` (completed, failed or interrupted); a completed run gets its report. Returns the JSON."""
        self.content["status"] = status
        if status == "completed":
            self._report()
        return self._text()

    def _report(self) -> None:
        from xray_runtime.report.html import write_report

        held = view(self._output).files
        records = [
            StageRecord(s["name"], s["kind"], records_directory(self._output, s["name"], s["key"]) / METRICS)
            for s in self.content["stages"]
        ]
        for record in records:
            # The report includes figures as they are; one that is not as signed is drawn again.
            kept = record.metrics_path.with_suffix(FIGURE)
            if any(held.get(name) != sha256 for name, sha256 in digests(self._output, [kept]).items()):
                kept.unlink()
        shown = []
        if self._evaluation is not None:
            shown = json.loads((self._evaluation[1] / "samples.json").read_text(encoding="utf-8"))
        config = yaml.safe_dump(self._record, sort_keys=False, allow_unicode=True)
        write_report(self.report, self.content, records, shown, config, self.evaluations())

    def markdown(self, page: Callable[[str], str | None]) -> str:
        """A summary for Prefect's page; `page`: MLflow run → address of its page."""
        e, registered = self.content["evaluation"], self.content["registered"]
        rows = [] if e is None else evaluation_rows(e)
        if registered is not None:
            rows.append(("registered", f"{registered['name']} version {registered['version']} @{registered['alias']}"))
        rows += [(s["name"], finding) for s in self.content["stages"] for finding in s["findings"]]
        rows.append(("report", f"`{self.report}`"))
        lines = ["| result | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
        table = self.evaluations()
        if len(self._measured) > 1:
            lines += ["", f"| policy | {' | '.join(table.columns)} |", f"|---|{'---|' * len(table.columns)}"]
            lines += [f"| {' | '.join(cells)} |" for cells in table.cells()]
        lines += ["", "| stage | computed | checkpoint | MLflow |", "|---|---|---|---|"]
        for s in self.content["stages"]:
            address = page(s["mlflow_run_id"])
            link = f"[run]({address})" if address else f"`{s['mlflow_run_id']}`"
            cells = [s["name"], computed_text(s), f"`{s['checkpoint']['sha256'][:12]}`", link]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def _write(self) -> None:
        with self._lock:
            write_atomic(self.path, self._text())

    def _text(self) -> str:
        self.content["seconds"] = time.perf_counter() - self._start
        return json.dumps(self.content, indent=2)


def end_record(output: Path, path: Path, content: str) -> None:
    """Log the end of a run with digests of its files, and write `content` to its lifecycle.json at `path`."""
    run, held = json.loads(content), view(output).files
    directories = [records_directory(output, stage["name"], stage["key"]) for stage in run["stages"]]
    # A stage's records were signed when it ended; files that changed since are not signed again.
    files = {
        name: sha256
        for name, sha256 in digests(output, directories).items()
        if held.get(name, sha256) == sha256 or name.endswith(FIGURE)
    }
    files |= digests(output, [path.with_name(REPORT), output / ARTIFACTS / run["run_id"]])
    files[path.relative_to(output).as_posix()] = hashlib.sha256(content.encode()).hexdigest()
    append(output, signing_key(output), RunEnded(run_id=run["run_id"], status=run["status"]), files)
    write_atomic(path, content)


def _finished(checkpoint: Path) -> str | None:
    """When a checkpoint was made (ISO 8601), by its statement; None if it has none."""
    try:
        return read_statement(checkpoint).predicate.details.metadata.finished
    except (OSError, ValueError):
        return None
