"""A stage's records on disk, without any store."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from xray_runtime.kernel.graph.kind import Answer
from xray_runtime.kernel.report.figures import read_metrics
from xray_runtime.kernel.store.seal import process_seal
from xray_runtime.kernel.tracking import recorder as module
from xray_runtime.kernel.tracking.recorder import StageRecorder

KEY = "ab" * 32


def silent(*_: Any) -> None:
    pass


def test_an_attempt_starts_its_records_anew(tmp_path: Path) -> None:
    first = StageRecorder(tmp_path, "sft", KEY, None, silent, every=1, seal=process_seal())
    for step in range(3):
        first.metrics({"sft/loss": 9.0}, step)
    first.close()
    second = StageRecorder(tmp_path, "sft", KEY, None, silent, every=1, seal=process_seal())
    second.begin()
    second.metrics({"sft/loss": 1.0}, 0)
    second.close()
    assert second.metrics_path == first.metrics_path
    assert read_metrics(second.metrics_path) == {"sft/loss": [(0, 1.0)]}
    # Another key is another place.
    assert (
        StageRecorder(tmp_path, "sft", "cd" * 32, None, silent, every=1, seal=process_seal()).metrics_path
        != first.metrics_path
    )


def test_progress_is_thinned_but_never_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    seen: list[Any] = []
    recorder = StageRecorder(
        tmp_path, "sft", KEY, None, lambda *progress: seen.append(progress), every=1, seal=process_seal()
    )
    for done in range(1, 11):
        recorder.progress(done, 10, "steps", f"at {done}")
        now += 0.06
    # The first, then one in 0.2 s: at 0.24 s and 0.48 s; and the last, 0.06 s after that.
    assert seen == [("sft", done, 10, "steps", f"at {done}") for done in (1, 5, 9, 10)]
    # The file for pages is written at the beginning, and then every 3 s.
    shown = tmp_path / "records" / f"sft-{KEY[:12]}" / "progress.json"
    assert json.loads(shown.read_text())["done"] == 1
    now += 3.0
    recorder.progress(10, 10, "steps", "")
    assert json.loads(shown.read_text())["done"] == 10
    recorder.close()
    assert not shown.exists()


def test_a_question_is_asked_where_somebody_can_answer(tmp_path: Path) -> None:
    assert StageRecorder(tmp_path, "ppo", KEY, None, silent, every=1, seal=process_seal()).ask("go on?") is None
    answer = Answer(True, "Ada", "yes")
    asked: list[str] = []
    recorder = StageRecorder(
        tmp_path, "ppo", KEY, None, silent, 1, process_seal(), ask=lambda text: asked.append(text) or answer
    )
    assert (recorder.ask("go on?"), asked) == (answer, ["go on?"])


class SlowTracking:
    """An MLflow run that takes points once it is `open`, and refuses the first ones it is told to."""

    def __init__(self, refused: int = 0) -> None:
        self.open, self.refused, self.steps = threading.Event(), refused, list[int]()

    def points(self, lines: list[dict[str, Any]]) -> None:
        assert self.open.wait(timeout=60)
        if self.refused:
            self.refused -= 1
            raise OSError("away")
        self.steps += [line["step"] for line in lines]


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_snapshot_does_not_wait_for_tracking(tmp_path: Path, refused: int) -> None:
    run = SlowTracking(refused)
    recorder = StageRecorder(tmp_path, "sft", KEY, run, silent, 1, process_seal())  # type: ignore[arg-type]
    recorder.begin()
    for step in range(4):
        recorder.metrics({"sft/loss": 1.0}, step)
        if step in (1, 2):
            recorder.write_snapshot(step + 1, {}, lambda directory: None)
    assert run.steps == []
    run.open.set()
    recorder.send()
    # All, in order and once each, whether or not tracking took them at the first try.
    assert run.steps == [0, 1, 2, 3]
    recorder.close()


def test_pending_metrics_are_sent_before_closing(tmp_path: Path) -> None:
    run = SlowTracking()
    recorder = StageRecorder(tmp_path, "sft", KEY, run, silent, 1, process_seal())  # type: ignore[arg-type]
    recorder.begin()
    recorder.metrics({"sft/loss": 1.0}, 0)
    recorder.write_snapshot(1, {}, lambda directory: None)
    threading.Timer(0.05, run.open.set).start()
    recorder.close()
    assert run.steps == [0]
