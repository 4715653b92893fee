"""lifecycle.json, the record of a run that programs read, and the report that people read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xray.tasks.stage import StageResult
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.loading import resolved_yaml
from xray_runtime.files import write_atomic
from xray_runtime.store.identity import digest
from xray_runtime.tracking.recorder import records_directory

LIFECYCLE = "lifecycle.json"


def unfinished(place: Path, config: LifecycleConfig) -> dict[str, Any] | None:
    """The lifecycle.json of a run of the same config that did not come to its end, if that is what `place` holds."""
    try:
        content = json.loads((place / LIFECYCLE).read_text(encoding="utf-8"))
        same = content["config_digest"] == digest(config.model_dump(mode="json"))
        return content if same and content["status"] != "completed" and content["run_id"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


class RunSummary:
    """Written after every stage, atomically, so that a reader always finds a whole one.

    Args:
        output: directory of the checkpoints and records.
        place: directory of lifecycle.json and the report.
    """

    def __init__(
        self, output: Path, place: Path, config: LifecycleConfig, run_id: str, flow_run_id: str | None
    ) -> None:
        self.path, self.report = place / LIFECYCLE, place / "report.html"
        self._output, self._config, self._start = output, config, time.perf_counter()
        self.content: dict[str, Any] = {
            "run_id": run_id,
            "flow_run_id": flow_run_id,
            "config_digest": digest(config.model_dump(mode="json")),
            "project": config.project,
            "seed": config.seed,
            "status": "running",
            "seconds": 0.0,
            "stages": [],
            "evaluation": None,
            "registered": None,
        }
        self._write()

    def stage_done(self, result: StageResult, cached: bool, seconds: float) -> None:
        self.content["stages"].append(
            {
                "name": result.name,
                "kind": result.kind,
                "key": result.key,
                "checkpoint": {"uri": result.checkpoint.uri, "sha256": result.checkpoint.sha256},
                "parents": sorted(set(result.parents.values())),
                "dataset": result.dataset,
                "mlflow_run_id": result.mlflow_run_id,
                "mlflow_model_id": result.checkpoint.mlflow_model_id,
                "seconds": seconds,
                "attempts": 0 if cached else result.attempts,
                "cached": cached,
            }
        )
        self._write()

    def completed(self, evaluation: Path, registered: dict[str, str]) -> None:
        """`evaluation`: the directory of the evaluation's checkpoint."""
        from xray_runtime.report.html import StageRecord, write_report

        self.content["evaluation"] = json.loads((evaluation / "evaluation.json").read_text())
        self.content["registered"] = registered
        self.content["status"] = "completed"
        self._write()
        records = [
            StageRecord(s["name"], s["kind"], records_directory(self._output, s["name"], s["key"]) / "metrics.jsonl")
            for s in self.content["stages"]
        ]
        samples = json.loads((evaluation / "samples.json").read_text())
        write_report(self.report, self.content, records, samples, resolved_yaml(self._config))

    def ended(self, evaluation: Path | None) -> None:
        """It came to the end that was asked for, without registration, and maybe without an evaluation."""
        if evaluation is not None:
            self.content["evaluation"] = json.loads((evaluation / "evaluation.json").read_text())
        self.content["status"] = "completed"
        self._write()

    def failed(self) -> None:
        self.content["status"] = "failed"
        self._write()

    def markdown(self, page: Callable[[str], str | None]) -> str:
        """A summary for Prefect's page; `page`: MLflow run → where people see it."""
        e, registered = self.content["evaluation"], self.content["registered"]
        low, high = e["win_rate_ci95"]
        rows = [("win rate over SFT", f"{e['win_rate']:.3f} (95%: {low:.3f} to {high:.3f}, {e['samples']} prompts)")]
        if e["gold_after"] is not None:
            rows.append(("gold score", f"{e['gold_before']:+.3f} → {e['gold_after']:+.3f}"))
        rows += [
            ("reward", f"{e['reward_before']:+.3f} → {e['reward_after']:+.3f}"),
            ("KL to SFT", f"{e['kl']:.2f} nats a reply"),
            ("registered", f"{registered['name']} version {registered['version']} @{registered['alias']}"),
            ("report", f"`{self.report}`"),
        ]
        lines = ["| result | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
        lines += ["", "| stage | seconds | computed | checkpoint | MLflow |", "|---|---|---|---|---|"]
        for s in self.content["stages"]:
            address = page(s["mlflow_run_id"])
            link = f"[run]({address})" if address else f"`{s['mlflow_run_id']}`"
            cells = [
                s["name"],
                f"{s['seconds']:.1f}",
                "before" if s["cached"] else "now",
                f"`{s['checkpoint']['sha256'][:12]}`",
                link,
            ]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def _write(self) -> None:
        self.content["seconds"] = time.perf_counter() - self._start
        write_atomic(self.path, json.dumps(self.content, indent=2))
