"""The recorder of a stage: files under the output directory, the stage's MLflow run, and reports of progress.

The file of metrics is the record. MLflow gets the points that a snapshot or the published checkpoint has made final,
each with its time in the file. So a resumed attempt neither doubles a point nor leaves one out, and a tracking server
that was away gets its points later.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xray_runtime.kernel.errors import StageInterruptedError, WorkerEndedError
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.store.seal import Seal
from xray_runtime.kernel.store.shared import SharedStore
from xray_runtime.kernel.store.snapshots import SNAPSHOTS, Snapshot, Snapshots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from xray_runtime.kernel.graph.kind import Answer
    from xray_runtime.kernel.tracking.mirrors import Mirror
    from xray_runtime.kernel.tracking.mlflow_tracker import StageRun

log = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int, str, str], None]
"""(stage, done, total, unit, note)."""

PROGRESS_SECONDS = 0.2
METRICS, ATTEMPTS, PROGRESS = "metrics.jsonl", "attempts", "progress.json"
PROGRESS_FILE_SECONDS = 3.0
"""How often a stage writes `PROGRESS`, for pages that show how much is left; it goes when the stage ends."""
CURVES, TRAINING = ".svg", "training.svg"
"""Suffix of the panels of a stage's curves, beside its metrics; file of the sheet with all of them."""
MAX_METRICS_BYTES = 2**30
RECORDS = "records"


def records_directory(output: Path, stage: str, key: str) -> Path:
    """Directory of a stage's records: metrics.jsonl, tables, figures. None of them enters a checkpoint."""
    return output / RECORDS / f"{stage}-{key[:12]}"


def read_points(path: Path) -> list[dict[str, Any]]:
    """The points of a file of metrics: `step`, `time_ms`, `metrics`. Raises ValueError for a link or a special file."""
    return points_of(read_bounded(path, MAX_METRICS_BYTES))


def points_of(content: bytes) -> list[dict[str, Any]]:
    """The points in the content of a file of metrics, as `read_points`."""
    return [json.loads(line) for line in content.splitlines()]


def snapshots_directory(output: Path, stage: str, key: str) -> Path:
    """Directory of the snapshots of a running stage."""
    return output / SNAPSHOTS / f"{stage}-{key[:12]}"


class StageRecorder:
    """The `Recorder` of a real stage.

    Args:
        every, every_s: steps and seconds between periodic snapshots.
        seal: kept files are read only if it sealed them.
        shared: keeps copies of snapshots.
        ask: asks a person a question; None if nobody can be asked.
        mirror: opens another place for the points, given the directory of records.
    """

    def __init__(
        self,
        output: Path,
        stage: str,
        key: str,
        run: StageRun | None,
        on_progress: OnProgress,
        every: int,
        seal: Seal,
        shared: SharedStore | None = None,
        ask: Callable[[str], Answer | None] | None = None,
        every_s: float = math.inf,
        mirror: Callable[[Path], Mirror] | None = None,
    ) -> None:
        self._ask, self.seal = ask, seal
        self.log_dir = output / "logs" / stage
        self._interrupted: type[StageInterruptedError | WorkerEndedError] | None = None
        self._stage, self._run, self._on_progress = stage, run, on_progress
        self._directory = records_directory(output, stage, key)
        self._directory.mkdir(parents=True, exist_ok=True)
        self.metrics_path = self._directory / METRICS
        self._snapshots = Snapshots(snapshots_directory(output, stage, key), every, seal, shared, every_s)
        self.kept = self._snapshots.directory
        """A directory that lasts from attempt to attempt until the stage is published."""
        self.kept_shared = self._snapshots.kept
        """The same for attempts on any machine."""
        self._metrics = self.metrics_path.open("ab")
        attempts = self._directory / ATTEMPTS
        before = seal.read_sealed(attempts)
        self.attempt = int(before) + 1 if before is not None else 1
        """Number of this attempt under the stage's key, from 1."""
        self._write(ATTEMPTS, str(self.attempt).encode())
        self._hash = hashlib.sha256()
        """Digest of the points in the file of metrics that this process wrote, or found in a snapshot."""
        self._size = 0
        """Their bytes."""
        self._newest: Snapshot | None = None
        self._sender, self._sent = ThreadPoolExecutor(1), 0
        self._open_mirror, self._mirrored = mirror, 0
        self._mirror: Mirror | None = None
        self._reported = 0.0
        self._phase: tuple[int, str, int] = (0, "", 0)
        """Total and unit of what the stage does now, and the time when that began, in ms."""
        self._shown = 0.0

    def progress(self, done: int, total: int, unit: str, note: str = "") -> None:
        if time.monotonic() - self._reported >= PROGRESS_SECONDS or done == total:
            self._reported = time.monotonic()
            self._on_progress(self._stage, done, total, unit, note)
            self._show_progress(done, total, unit)

    def _show_progress(self, done: int, total: int, unit: str) -> None:
        now = int(time.time() * 1000)
        if self._phase[:2] != (total, unit):
            self._phase = total, unit, now
        elif self._reported - self._shown < PROGRESS_FILE_SECONDS:
            return
        self._shown = self._reported
        text = json.dumps({"done": done, "total": total, "unit": unit, "began_ms": self._phase[2], "at_ms": now})
        write_atomic(self._directory / PROGRESS, text.encode())

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self._snapshots.check()
        line = {"step": step, "time_ms": int(time.time() * 1000), "metrics": {k: float(v) for k, v in values.items()}}
        text = json.dumps(line).encode() + b"\n"
        self._write_points(text)
        # Others read this file while the stage runs.
        self._metrics.flush()

    def _write_points(self, text: bytes) -> None:
        self._hash.update(text)
        self._size += len(text)
        self._metrics.write(text)

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        text = json.dumps({"columns": columns, "rows": rows}, ensure_ascii=False, indent=1)
        self._write(f"{name}.json", text.encode())
        if self._run is not None:
            self._run.table(name, columns, rows)

    def figure(self, name: str, figure: Figure) -> None:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120)
        self._show(f"{name}.png", buffer.getvalue())

    def curves(self, panels: str, sheet: str) -> None:
        """Keep the stage's curves, in SVG: its panels for reports, and a sheet with all of them, which MLflow shows."""
        self._write(self.metrics_path.with_suffix(CURVES).name, panels.encode())
        self._show(TRAINING, sheet.encode())

    def _show(self, name: str, content: bytes) -> None:
        """Write a picture, and show it in MLflow."""
        self._write(name, content)
        if self._run is not None:
            self._run.picture(self._directory / name)

    def _write(self, name: str, content: bytes) -> None:
        """Write a record with its seal: the end of the stage signs no other file."""
        self.seal.seal_content(self._directory / name, hashlib.sha256(content).hexdigest(), len(content))
        write_atomic(self._directory / name, content)

    def ask(self, question: str) -> Answer | None:
        if self._ask is None:
            log.warning("%s: there is no Prefect page on which a person could answer", self._stage)
            return None
        return self._ask(question)

    def interrupt(self, error: type[StageInterruptedError | WorkerEndedError] = StageInterruptedError) -> None:
        """Stop the stage after the current step, with a snapshot and `error`; from any thread or signal handler.

        A request to stop the run takes precedence over one to end this worker.
        """
        if self._interrupted is not StageInterruptedError:
            self._interrupted = error

    def begin(self) -> None:
        """Start or resume: points recorded after the newest snapshot are dropped."""
        self._newest = self._snapshots.latest()
        self._metrics.truncate(0)
        self._hash, self._size = hashlib.sha256(), 0
        if self._newest is not None:
            self._write_points((self._newest.directory / METRICS).read_bytes())
        self._secure()

    def resume(self) -> Snapshot | None:
        return self._newest

    def refuse_snapshot(self, problem: str) -> None:
        """Resume from the snapshot before the newest, in which a rank found a damaged shard."""
        assert self._newest is not None
        self._snapshots.refuse(self._newest, problem)
        self.begin()

    def snapshot_due(self, step: int) -> bool:
        return self._interrupted is not None or self._snapshots.due(step)

    def write_snapshot(self, step: int, state: dict[str, Any], save: Callable[[Path], None]) -> None:
        with self._snapshots.writing(step, state) as directory:
            # The points so far are part of the snapshot.
            self._secure()
            shutil.copyfile(self.metrics_path, directory / METRICS)
            save(directory)
        # The next step does not wait for MLflow.
        self._sender.submit(self._try_to_send, self.metrics_path.stat().st_size)
        if self._interrupted is not None:
            raise self._interrupted(f"{self._stage}: stopped after step {step}; run it again to continue from there")

    def send(self) -> None:
        """Send MLflow the points that this attempt has not sent; repeating those of an earlier one is harmless."""
        self._secure()
        self._sender.submit(self._send, self.metrics_path.stat().st_size).result()

    def _send(self, end: int) -> None:
        """Send the points in the file of metrics up to byte `end`."""
        self._send_to_mirror(end)
        if self._run is not None:
            self._run.points(self._points(self._sent, end))
            self._sent = end

    def _send_to_mirror(self, end: int) -> None:
        """A mirror that fails costs its own points alone, until it is tried again."""
        try:
            if self._mirror is None and self._open_mirror is not None:
                self._mirror = self._open_mirror(self._directory)
            if self._mirror is not None:
                self._mirror.points(self._points(self._mirrored, end))
                self._mirrored = end
        except Exception:
            log.warning("%s: the mirror did not accept the metrics", self._stage, exc_info=True)

    def _points(self, begin: int, end: int) -> list[dict[str, Any]]:
        with self.metrics_path.open("rb") as file:
            file.seek(begin)
            return [json.loads(line) for line in file.read(end - begin).splitlines()]

    def _try_to_send(self, end: int) -> None:
        try:
            self._send(end)
        except Exception:
            log.warning("%s: MLflow did not accept the metrics; they are sent later", self._stage, exc_info=True)

    def seal_metrics(self) -> None:
        """Seal the file of metrics as this process wrote it, before the stage is published."""
        self._secure()
        self.seal.seal_content(self.metrics_path, self._hash.hexdigest(), self._size)

    def sealed(self) -> dict[Path, str]:
        """Record → sha256 of every file that this or an earlier attempt wrote, if it did not change since."""
        digests = {path: self.seal.sealed_sha256(path) for path in sorted(self._directory.iterdir())}
        return {path: sha256 for path, sha256 in digests.items() if sha256 is not None}

    def finished(self) -> None:
        """Remove the snapshots: the stage is published."""
        self._snapshots.clear()

    def close(self) -> None:
        """Wait for what is still being sent, and close the file of metrics."""
        self._sender.shutdown()
        if self._mirror is not None:
            self._mirror.close()
        self._metrics.close()
        (self._directory / PROGRESS).unlink(missing_ok=True)

    def _secure(self) -> None:
        """Flush the metrics to disk."""
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
