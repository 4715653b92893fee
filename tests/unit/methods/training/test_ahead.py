"""The loops of stages begin a step before the answer of the one before is read, unless something else is asked then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.methods.ppo.recorder import FakeRecorder
from tests.unit.methods.training import test_sft
from tests.unit.methods.training.test_sft import SIZES, Learner
from xray_runtime.cluster.protocols import Ready
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.batch import Scores, StepTotals, TextBatch
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.store.snapshots import Snapshot
from xray_runtime.methods.sft import body as sft
from xray_runtime.methods.sft.config import SFTConfig, SFTValidation
from xray_runtime.methods.sft.kind import SFTInputs

inputs = test_sft.inputs
STEPS, BATCH, EVERY = 40, 2, 7


class Answer(Ready[dict[str, float]]):
    """An answer that is counted when it is read."""

    def __init__(self, model: Busy, answer: dict[str, float]) -> None:
        vars(self).update(model=model, answer=answer)

    @property
    def value(self) -> dict[str, float]:  # type: ignore[override]
        self.model.running -= 1
        return self.answer


class Busy(Learner):
    """Counts the steps that run, and refuses other calls meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.running = self.most = 0
        self.learned: list[list[int]] = []
        self.train = self

    def remote(self, rows: TextBatch, totals: StepTotals, lr: float) -> Answer:
        self.running += 1
        self.most = max(self.most, self.running)
        self.learned.append(rows.input_ids.values.tolist())
        return Answer(self, self.do_train(rows, totals, lr))

    def do_score(self, rows: TextBatch) -> Scores:
        assert not self.running
        return Scores(nll=np.ones(len(rows)))

    def do_save(self, directory: Path, head_file: str | None = None) -> None:
        assert not self.running
        super().do_save(directory, head_file)

    def do_save_state(self, directory: Path) -> None:
        assert not self.running
        super().do_save_state(directory)


class SeldomRecorder(FakeRecorder):
    """Makes a snapshot every `EVERY` steps; from step `stop` on one is due at once, as where a stage is to stop."""

    stop = 10**6

    def snapshot_due(self, step: int) -> bool:
        return step % EVERY == 0 or step >= self.stop


def trained(inputs: SFTInputs, out: Path, recorder: type[FakeRecorder], newest: Snapshot | None = None) -> Any:
    model, records = Busy(), recorder(out, newest)

    @contextlib.contextmanager
    def open_models(specs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        yield dict.fromkeys(specs, model)

    out.mkdir()
    config = SFTConfig(steps=STEPS, batch_size=BATCH, validation=SFTValidation(every=11, keep="last"))
    stage = Stage("sft", 7, config, inputs, RuntimeConfig(), open_models, kept=out / "kept")
    assert sft.run(stage, out, records) == STEPS
    return model, records


def test_a_step_begins_before_the_one_before_is_read(inputs: SFTInputs, tmp_path: Path) -> None:
    ahead, records = trained(inputs, tmp_path / "ahead", SeldomRecorder)
    waits, all_records = trained(inputs, tmp_path / "waits", FakeRecorder)
    assert (ahead.most, waits.most) == (2, 1)
    assert ahead.learned == waits.learned
    losses = [[point["sft/loss"] for point in r.points if "sft/loss" in point] for r in (records, all_records)]
    assert losses[0] == losses[1] == [1.0] * STEPS
    # Snapshots are of the state after their own step: the next rows are not drawn yet.
    assert [each.step for each in records.snapshots] == [7, 14, 21, 28, 35]
    for each in records.snapshots:
        cursor = each.state["cursor"]
        assert cursor["epoch"] * SIZES["train"] + cursor["position"] == each.step * BATCH
        assert (each.directory / "policy").read_text() == str(each.step)
    resumed, _ = trained(inputs, tmp_path / "resumed", SeldomRecorder, records.snapshots[1])
    assert resumed.learned == ahead.learned[14:]


def test_a_snapshot_that_becomes_due_waits_for_the_step_that_runs(
    inputs: SFTInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SeldomRecorder, "stop", 17)
    _, records = trained(inputs, tmp_path / "out", SeldomRecorder)
    assert [each.step for each in records.snapshots] == [7, 14, *range(17, STEPS)]
