"""A stage resumes from the newest snapshot of which no rank finds a shard damaged."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.unit.methods.ppo.fake_model import FakeModel
from xray_runtime.kernel.store.seal import process_seal
from xray_runtime.kernel.tracking.recorder import StageRecorder
from xray_runtime.methods.common.training.resumable import Resumable


class Model(FakeModel):
    """Knows the step of its state, and finds the states of some steps damaged."""

    def __init__(self, damaged: tuple[int, ...] = ()) -> None:
        self.step, self.damaged = 0, damaged

    def do_save_state(self, directory: Path) -> None:
        directory.write_text(str(self.step))

    def do_check_state(self, directory: Path) -> str | None:
        return f"{directory} was changed" if int(directory.read_text()) in self.damaged else None

    def do_load_state(self, directory: Path) -> None:
        self.step = int(directory.read_text())


def recorder(output: Path) -> StageRecorder:
    found = StageRecorder(output, "sft", "k" * 64, None, lambda *_: None, every=1, seal=process_seal())
    found.begin()
    return found


@pytest.mark.parametrize(("damaged", "expected"), [((), 2), ((2,), 1), ((1, 2), 0)])
def test_a_damaged_snapshot_is_passed_over_before_any_model_changes(
    tmp_path: Path, damaged: tuple[int, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xray_runtime.kernel.store.snapshots.MAX_SHARE", math.inf)
    first, model = recorder(tmp_path), Model()
    snapshots = first.kept
    for step in (1, 2):
        first.metrics({"loss": float(step)}, step)
        model.step = step
        Resumable(first, {"policy": model, "critic": model}).step_done(step, 9)
        if step == 1:
            kept = (snapshots / "step-0000000001").rename(tmp_path / "kept")
    kept.rename(snapshots / "step-0000000001")
    again, policy, critic = recorder(tmp_path), Model(), Model(damaged)
    assert Resumable(again, {"policy": policy, "critic": critic}).restore() == expected
    assert (policy.step, critic.step) == (expected, expected)
    # Points after the snapshot are dropped.
    assert len(again.metrics_path.read_text().splitlines()) == expected
