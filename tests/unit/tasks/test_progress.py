"""What a stage says on Prefect's page: lines of log at a modest rate, and one artifact."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from xray.tasks import progress
from xray.tasks.progress import LOG_SECONDS, PAGE_SECONDS, StageProgress
from xray.tasks.spec import StageResult
from xray_runtime.kernel.store.ref import CheckpointRef


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What the artifact was set to: title and text."""
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(progress, "find_progress", lambda run_id: None)
    monkeypatch.setattr(StageProgress, "_show", lambda self, title, text: found.append((title, text)))
    return found


def test_a_stage_logs_its_start_its_progress_and_what_came_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, shown: list[tuple[str, str]], tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    report = StageProgress("sft", "run")
    report("sft", 0, 0, "", "starting")
    report("sft", 0, 0, "", "starting")
    for step in range(1, 62):
        now = float(step)
        report("sft", step, 61, "steps", f"loss {10 - step / 10:.1f}")
    checkpoint = CheckpointRef(uri=str(tmp_path), sha256="ab" * 32, stage="sft", kind="sft", type="Model", step=61)
    result = StageResult(
        name="sft",
        kind="sft",
        key="k",
        checkpoint=checkpoint,
        parents={},
        dataset=None,
        mlflow_run_id="r",
        seconds=61.2,
        attempts=1,
    )
    report.ended(result, "loss 9.9 → 3.9", "the page")
    assert (LOG_SECONDS, PAGE_SECONDS) == (30, 10)
    assert [record.getMessage() for record in caplog.records] == [
        "sft: starting",
        "sft: 1/61 steps loss 9.9",
        "sft: 31/61 steps loss 6.9",
        "sft: 61/61 steps loss 3.9",
        "sft: done in 61 s, loss 9.9 → 3.9",
    ]
    assert [title.split("/")[0] for title, _ in shown[:-1]] == ["1", "11", "21", "31", "41", "51", "61"]
    assert shown[-1] == ("loss 9.9 → 3.9", "the page")


def test_a_stage_from_the_store_says_so(caplog: pytest.LogCaptureFixture, shown: list[tuple[str, str]]) -> None:
    caplog.set_level(logging.INFO)
    StageProgress("sft", "run").cached()
    assert [record.getMessage() for record in caplog.records] == ["sft: found in the store, nothing was computed"]
    assert shown == []
