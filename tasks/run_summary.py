"""lifecycle.json, the record of a run, and its report."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xray.tasks.spec import StageResult
from xray.tasks.summary import evaluation_rows
from xray_runtime.data.published_pictures import PublishedPictures, as_html
from xray_runtime.kernel.config.loading import to_yaml
from xray_runtime.kernel.evidence.log import LIFECYCLE, REPORT
from xray_runtime.kernel.evidence.statement import read_statement
from xray_runtime.kernel.evidence.view import RunEnded
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.graph.artifacts import Dataset, Evaluation, Preferences
from xray_runtime.kernel.graph.kind import Note
from xray_runtime.kernel.graph.kinds import find_kind
from xray_runtime.kernel.history.evidence import evidence, read_logged
from xray_runtime.kernel.report.evaluations import EvaluationResults, SideBySide, as_json, measured, side_by_side
from xray_runtime.kernel.report.figures import StageRecord, parse_metrics
from xray_runtime.kernel.report.rendering import computed_text, markdown_table
from xray_runtime.kernel.store.identity import digest
from xray_runtime.kernel.store.published import read_published
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.kernel.store.seal import SEALED
from xray_runtime.kernel.tracking.recorder import METRICS, records_directory


class RunSummary:
    """The content of lifecycle.json, written atomically after every stage.

    Args:
        output: directory of the checkpoints and records.
        run_directory: directory of lifecycle.json and the report.
        record: the config of the run.
        address: address of its MLflow page (`Tracker.address`).
    """

    def __init__(
        self,
        output: Path,
        run_directory: Path,
        record: Mapping[str, Any],
        run_id: str,
        flow_run_id: str | None,
        address: str,
    ) -> None:
        self.path, self.report = run_directory / LIFECYCLE, run_directory / REPORT
        self._output, self._record, self._start = output, dict(record), time.perf_counter()
        self._lock = threading.Lock()
        self._stages: dict[int, dict[str, Any]] = {}
        self._measured: dict[int, EvaluationResults] = {}
        self._datasets: list[tuple[Path, str]] = []
        """Directory and sha256 of the data, which may have pictures."""
        self._evaluation: tuple[int, CheckpointRef] | None = None
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
        self._seal = evidence().seal(output)
        self.files: dict[Path, str] = {}
        """Path → sha256 of the report and of curves that this run wrote for it."""
        self._write()

    def stage_done(self, number: int, result: StageResult, seconds: float) -> None:
        """Add the `number`th stage of the graph."""
        findings = self._findings(result)
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
            "findings": findings,
            "notes": [finding for finding in findings if isinstance(finding, Note)],
        }
        self.content["stages"] = [self._stages[n] for n in sorted(self._stages)]
        kind = find_kind(result.kind)
        if kind is not None and kind.output in (Dataset, Preferences):
            self._datasets.append((result.checkpoint.path, result.checkpoint.sha256))
        if kind is not None and kind.sides and kind.results:
            self._measured[number] = measured(kind, result.checkpoint.path, result.checkpoint.sha256)
            self.content["evaluations"] = as_json(self.evaluations())
            if kind.output is Evaluation and (self._evaluation is None or self._evaluation[0] < number):
                self._evaluation = number, result.checkpoint
                self.content["evaluation"] = json.loads(_published(result.checkpoint, "evaluation.json"))
        self._write()

    def evaluations(self) -> SideBySide:
        """The measurements of all policies so far."""
        names = {stage["checkpoint"]["sha256"]: stage["name"] for stage in self.content["stages"]}
        return side_by_side([self._measured[n] for n in sorted(self._measured)], names)

    def _findings(self, result: StageResult) -> list[str]:
        kind = find_kind(result.kind)
        path = records_directory(self._output, result.name, result.key) / METRICS
        return [] if kind is None else list(kind.findings(parse_metrics(read_logged(self._output, path) or b"")))

    def registered(self, registered: Mapping[str, str]) -> None:
        self.content["registered"] = dict(registered)
        self._write()

    def close(self, status: str, failure: str | None = None) -> str:
        """Set `status` (completed, failed or interrupted), and why it failed; a completed run gets its report.

        Returns the JSON.
        """
        self.content["status"] = status
        if failure is not None:
            self.content["failure"] = failure
        if status == "completed":
            self._report()
        return self._text()

    def _report(self) -> None:
        from xray_runtime.kernel.report.html import write_report

        records = [
            StageRecord(s["name"], s["kind"], records_directory(self._output, s["name"], s["key"]) / METRICS)
            for s in self.content["stages"]
        ]
        shown = []
        if self._evaluation is not None:
            shown = json.loads(_published(self._evaluation[1], "samples.json"))
        config = to_yaml(self._record)
        read = functools.partial(read_logged, self._output)
        given = self.content, records, shown, config, self.evaluations(), read
        pictures = PublishedPictures(self._datasets)
        self.files |= write_report(self.report, *given, lambda text: as_html(text, pictures.thumbnail))

    def markdown(self, page: Callable[[str], str | None]) -> str:
        """A summary for Prefect's page; `page`: MLflow run → address of its page."""
        e, registered = self.content["evaluation"], self.content["registered"]
        rows = [] if e is None else evaluation_rows(e)
        if registered is not None:
            rows.append(("registered", f"{registered['name']} version {registered['version']} @{registered['alias']}"))
        rows += [(s["name"], finding) for s in self.content["stages"] for finding in s["findings"]]
        rows += [("report", f"`{self.report}`"), ("pages", f"`xray studio --output {self._output}`")]
        lines = markdown_table(("result", "value"), rows)
        table = self.evaluations()
        if len(self._measured) > 1:
            lines += ["", *markdown_table(("policy", *table.columns), table.cells())]
        stages = []
        for s in self.content["stages"]:
            address = page(s["mlflow_run_id"])
            link = f"[run]({address})" if address else f"`{s['mlflow_run_id']}`"
            stages.append((s["name"], computed_text(s), f"`{s['checkpoint']['sha256'][:12]}`", link))
        return "\n".join([*lines, "", *markdown_table(("stage", "computed", "checkpoint", "MLflow"), stages)])

    def _write(self) -> None:
        with self._lock:
            content = self._text().encode()
            # A run that is lost is closed by its sealed record alone (`lost_runs`).
            self._seal.seal_content(self.path, hashlib.sha256(content).hexdigest(), len(content))
            write_atomic(self.path, content)

    def _text(self) -> str:
        self.content["seconds"] = time.perf_counter() - self._start
        return json.dumps(self.content, indent=2)


def end_record(output: Path, path: Path, content: str, files: Mapping[Path, str] | None = None) -> None:
    """Log the end of a run, and write `content` to its lifecycle.json at `path`.

    Args:
        files: path → sha256 of the other files that the run wrote: what else lies beside them is not signed. Stages
            signed their records when they ended.
    """
    run = json.loads(content)
    signed = {file.relative_to(output).as_posix(): sha256 for file, sha256 in (files or {}).items()}
    signed[path.relative_to(output).as_posix()] = hashlib.sha256(content.encode()).hexdigest()
    evidence().append(output, RunEnded(run_id=run["run_id"], status=run["status"]), signed)
    write_atomic(path, content)
    path.with_name(path.name + SEALED).unlink(missing_ok=True)


def _published(checkpoint: CheckpointRef, name: str) -> bytes:
    return read_published(checkpoint.path, checkpoint.sha256, name)


def _finished(checkpoint: Path) -> str | None:
    """When a checkpoint was made (ISO 8601), by its statement; None if it has none."""
    try:
        return read_statement(checkpoint).predicate.details.metadata.finished
    except (OSError, ValueError):
        return None
