"""The records of one run: its MLflow run, lifecycle.json and the report."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from filelock import FileLock

from xray.tasks.output_directory import unfinished_run
from xray.tasks.run_summary import RunSummary, end_record
from xray.tasks.spec import RunContext, forwarded_variables
from xray.tasks.summary import run_description
from xray.tasks.this_flow import PAGE, flow_parameters, prefect_tags, trigger_of_run
from xray_runtime.kernel.config.loading import to_yaml
from xray_runtime.kernel.config.sources import SourceTerms
from xray_runtime.kernel.credentials import strip_credentials, tracking_address
from xray_runtime.kernel.errors import error_summary, is_cancelled
from xray_runtime.kernel.evidence.log import LIFECYCLE, REPORT, digests, view
from xray_runtime.kernel.evidence.view import LOCKS, RunBegan, run_lock
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.kernel.report.evaluations import figure
from xray_runtime.kernel.store.identity import digest, file_sha256, text_sha256
from xray_runtime.kernel.store.shared import open_shared
from xray_runtime.kernel.tracking.mlflow_tracker import ARTIFACTS, StageRun, Tracker, params_of, table_text
from xray_runtime.kernel.tracking.registry import LOG_TAG, own_store

NOTE = "mlflow.note.content"
MAX_FAILURE = 500
"""Characters of why a run failed."""
"""Tag of a run: its description on MLflow's page."""
HEADLINE = ("win_rate", "gold_before", "gold_after", "gold_delta", "reward_before", "reward_after", "kl")
"""Numbers of an evaluation that a run's page in MLflow shows and its lists sort by."""


class RunRecord:
    """Context of a run: opens its records, and closes them however the run ends.

    The arguments are those of `xray.workspace`; `storage` is the address of the shared store, if there is one.
    """

    def __init__(
        self,
        output: Path,
        *,
        project: str,
        seed: int,
        storage: str | None = None,
        record: Mapping[str, Any] | None = None,
        gates: Mapping[str, Any] | None = None,
        terms: Mapping[str, SourceTerms] | None = None,
        run_directory: Path | None = None,
        tags: Mapping[str, str] | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        self.output, self.project = output, project
        default = own_store(output)
        self.tracking_uri = tracking_uri or tracking_address() or default
        self._is_own, self._seed, self._storage = self.tracking_uri == default, seed, storage
        self._record, self._gates, self._tags = record, gates, dict(tags or {})
        self._terms = dict(terms or {})
        self._run_directory = run_directory or output
        self._sent: dict[str, str] = {}
        """Artifact that this run sent to MLflow → sha256."""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        (self.output / LOCKS).mkdir(parents=True, exist_ok=True)
        record = dict(self._record) if self._record is not None else flow_parameters()
        record = {"project": self.project, "seed": self._seed} | record
        evidence().prepare(self.output, open_shared(self._storage))
        self.tracker = self._open_tracker()
        before = unfinished_run(self._run_directory, self.output, record)
        self.flow_run_id, self._trigger = trigger_of_run()
        if before is not None and before["flow_run_id"] is not None:
            from xray.tasks.prefect_run import crash_lost_flow_run

            crash_lost_flow_run(before["flow_run_id"], self.flow_run_id)
        self.run_id = self._start(record, before)
        self._stack.enter_context(run_lock(self.output, self.run_id))
        evidence().append(self.output, self._began(record))
        self.summary = RunSummary(
            self.output, self._run_directory, record, self.run_id, self.flow_run_id, self.tracker.address(self.run_id)
        )
        page = self.tracker.page(self.run_id)
        if page is not None and self.flow_run_id is not None:
            from xray.tasks.prefect_run import show

            show("mlflow", "this run in MLflow", f"[This run in MLflow]({page}): `{self.output}`")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            status, mlflow_status = "completed", "FINISHED"
            failure: str | None = None
            if error is not None and is_cancelled(error):
                status, mlflow_status = "interrupted", "KILLED"
            elif error is not None:
                status, mlflow_status, failure = "failed", "FAILED", error_summary(error)[:MAX_FAILURE]
            content = self.summary.close(status, failure)
            try:
                if error is None:
                    self.tracker.client.log_text(self.run_id, content, LIFECYCLE)
                    self.tracker.log_files(self.run_id, self.summary.report)
                    self._log_evaluations()
                    self._log_headline()
                    self.tracker.log_datasets(self.run_id)
            finally:
                end_record(self.output, self.summary.path, content, self.summary.files | self._artifacts(content))
            self.tracker.tag(self.run_id, {LOG_TAG: view(self.output).mark} | self._result_tags(status))
            self.tracker.finish(self.run_id, mlflow_status)

    def context(self, node: str | None) -> RunContext:
        """The context for the run's tasks; `node`: the only node they may run on, if any."""
        return RunContext(
            output=str(self.output),
            tracking_uri=self.tracking_uri,
            experiment=self.project,
            run_id=self.run_id,
            flow_run_id=self.flow_run_id,
            trigger=self._trigger,
            gates=dict(self._gates) if self._gates is not None else None,
            terms=self._terms,
            node=node,
            tags=prefect_tags(),
            variables=forwarded_variables(),
            path=tuple(p for p in sys.path if p and "site-packages" not in p and Path(p).is_dir()),
        )

    def _log_evaluations(self) -> None:
        """Log all evaluations to the MLflow run: a table and a figure."""
        table = self.summary.evaluations()
        if table.rows:
            run, columns, cells = StageRun(self.tracker, self.run_id), ["policy", *table.columns], table.cells()
            run.table("evaluations", columns, cells)
            self._sent["evaluations.json"] = text_sha256(table_text(columns, cells))
            if (drawn := figure(table)) is not None:
                with TemporaryDirectory() as directory:
                    path = Path(directory) / "evaluations.png"
                    drawn.savefig(path, dpi=150)
                    self._sent[path.name] = file_sha256(path)
                    run.picture(path)

    def _log_headline(self) -> None:
        """Log the numbers of the last evaluation to the MLflow run, which has no other metrics."""
        evaluation = self.summary.content["evaluation"] or {}
        found = {name: float(evaluation[name]) for name in HEADLINE if evaluation.get(name) is not None}
        if found:
            StageRun(self.tracker, self.run_id).metrics([(0, int(time.time() * 1000), found)])

    def _result_tags(self, status: str) -> dict[str, str]:
        """The MLflow run's description, and tags to search by; those that begin with `xray.` are signed ones."""
        content, evaluation = self.summary.content, self.summary.content["evaluation"] or {}
        tags = {"result.status": status}
        if evaluation.get("win_rate") is not None:
            tags["result.win_rate"] = f"{evaluation['win_rate']:.3f}"
        if (registered := content["registered"]) is not None:
            tags["result.model"] = f"{registered['name']}/{registered['version']}"
        return tags | {NOTE: run_description(content, prefect_tags().get(PAGE), self.output)}

    def _artifacts(self, content: str) -> dict[Path, str]:
        """Artifact of the run's MLflow run → sha256, of those that are as this run sent them."""
        sent = self._sent | {LIFECYCLE: text_sha256(content), REPORT: self.summary.files.get(self.summary.report)}
        files = digests(self.output, [self.output / ARTIFACTS / self.run_id])
        return {self.output / name: sha256 for name, sha256 in files.items() if sent.get(Path(name).name) == sha256}

    def _open_tracker(self) -> Tracker:
        # If several processes create the same database, all but one fail.
        with FileLock(self.output / LOCKS / "mlflow.lock"):
            return Tracker(self.tracking_uri, self.project, self.output / "mlartifacts" if self._is_own else None)

    def _began(self, record: dict[str, Any]) -> RunBegan:
        run_directory = self._run_directory.relative_to(self.output).as_posix()
        return RunBegan(
            run_id=self.run_id,
            run_directory="" if run_directory == "." else run_directory,
            facts={"project": record.get("project"), "seed": record.get("seed"), "config_digest": digest(record)},
            tracking="" if self._is_own else strip_credentials(self.tracking_uri),
            experiment=self.project,
            name=self._name,
            params=digest(params_of(record)),
            tags=self._mlflow_tags(),
        )

    @property
    def _name(self) -> str:
        return f"{self.project} seed {self._seed}"

    def _mlflow_tags(self) -> dict[str, str]:
        return {"xray.output": str(self.output)} | self._tags | prefect_tags()

    def _start(self, record: dict[str, Any], before: dict[str, Any] | None) -> str:
        page = prefect_tags().get(PAGE)
        note = {NOTE: f"[Prefect flow run]({page})"} if page else {}
        text = to_yaml(record)
        self._sent["config.yaml"] = text_sha256(text)
        return self.tracker.start_lifecycle(
            before["run_id"] if before is not None else None,
            self._name,
            record,
            text,
            self._mlflow_tags() | note,
        )
